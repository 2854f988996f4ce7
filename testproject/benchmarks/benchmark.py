"""One run of the benchmark, which reports as it goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from testproject.benchmarks import (
    contenders,
    counting,
    machine,
    report,
    retention,
    servers,
    storm,
)
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.environments import CannotInstall
from testproject.benchmarks.private_redis import Redis
from testproject.benchmarks.scenarios import (
    BASELINE,
    SCENARIOS,
    executed_again,
    interleaved,
    summary,
)
from testproject.benchmarks.servers import DIRECTORY, DoesNotWork, Server

COMPARED = (*SCENARIOS, "d", "counts")  # with other contenders
RETENTION = ("cleanup", "reaper")
EVERYTHING = (*COMPARED, *RETENTION)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``seconds``: of each contender's turn in a round. ``share``: of the sizes in the
    scenarios of retention.
    """

    scenarios: Sequence[str] = EVERYTHING
    contenders: Sequence[str] = contenders.NAMES
    rounds: int = 6
    seconds: int = 4
    storms: int = 2
    share: float = 1


@dataclass
class Benchmark:
    plan: Plan
    cluster: Cluster
    redis: Redis | None
    failures: dict[str, str] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        results: dict[str, Any] = {
            "machine": machine.describe(self.cluster, DIRECTORY),
            "plan": asdict(self.plan),
        }
        say("\n".join(f"{name}: {value}" for name, value in results["machine"].items()))
        wanted = (
            self.plan.contenders
            if {*COMPARED}.intersection(self.plan.scenarios)
            else ()
        )
        names = [name for name in wanted if self._prepare(name)]
        try:
            results |= self._results(names)
        finally:
            for name in names:
                self.cluster.drop(servers.database(name))
        return {**results, "failures": self.failures}

    def _results(self, names: Sequence[str]) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if "counts" in self.plan.scenarios:
            results["counts"] = self._count(names)
        if {*SCENARIOS, "d"}.intersection(self.plan.scenarios):
            results["scenarios"] = self._race(names)
        for name in RETENTION:
            if name in self.plan.scenarios:
                results[name] = getattr(self, f"_{name}")()
        return results

    def _prepare(self, name: str) -> bool:
        try:
            servers.prepare(name, self.cluster, self.redis, DIRECTORY)
        except (CannotInstall, DoesNotWork) as error:
            self._fail(name, error)
            return False
        return True

    def _fail(self, name: str, error: Exception) -> None:
        self.failures[name] = str(error)
        say(f"{contenders.load(name).title} does not work: {error}")

    def _count(self, names: Sequence[str]) -> dict[str, Any]:
        counted = {
            name: counting.count(name, self.cluster, self.redis, DIRECTORY)
            for name in names
        }
        kinds = next(iter(counted.values()), {})
        figures = {
            kind: {name: asdict(counts[kind]) for name, counts in counted.items()}
            for kind in kinds
        }
        for title, rows in figures.items():
            for counts in rows.values():
                counts["wal_more"] = (
                    counts["wal_bytes"] - rows.get(BASELINE, counts)["wal_bytes"]
                )
            say(f"\nCounted, {title}:\n", report.table(_titled(rows), report.COUNTED))
        return figures

    def _race(self, names: Sequence[str]) -> dict[str, Any]:
        with ExitStack() as stack:
            running = [server for name in names if (server := self._start(name, stack))]
            results = {
                name: self._scenario(name, running)
                for name in SCENARIOS
                if name in self.plan.scenarios
            }
            if "d" in self.plan.scenarios:
                results["d"] = self._storm(running)
            again = {
                server.name: executed_again(server, self.cluster)
                for server in running
                if server.name != BASELINE
            }
        say(
            "\nEffects beyond one a key:",
            ", ".join(f"{name} {extra}" for name, extra in again.items()),
        )
        return {**results, "executed_again": again}

    def _start(self, name: str, stack: ExitStack) -> Server | None:
        try:
            return stack.enter_context(
                servers.running(name, self.cluster, self.redis, DIRECTORY)
            )
        except DoesNotWork as error:
            self._fail(name, error)
            return None

    def _scenario(self, name: str, running: Sequence[Server]) -> dict[str, Any]:
        scenario = SCENARIOS[name]
        rounds = interleaved(
            running,
            scenario,
            self.cluster,
            self.redis,
            rounds=self.plan.rounds,
            seconds=self.plan.seconds,
        )
        figures = summary(list(rounds))
        say(
            f"\n({name}) {scenario.title}:\n",
            report.table(_titled(figures), report.COLUMNS),
        )
        return figures

    def _storm(self, running: Sequence[Server]) -> dict[str, Any]:
        protected = [server for server in running if server.name != BASELINE]
        figures = {
            server.name: storm.summary(
                storm.storms(server, self.cluster, self.plan.storms)
            )
            for server in protected
        }
        say("\n(d) 500 duplicates of one key, other keys' traffic beside:\n")
        say(report.table(_titled(figures), report.STORM))
        return figures

    def _cleanup(self) -> dict[str, Any]:
        rows = self._share_of(1_000_000)
        figures = retention.measure("cleanup", self.cluster, rows=rows, kept=rows)
        say(
            f"\n(cleanup) {retention.RATE} claims a second, while"
            f" {figures['deleted']:,} records are deleted:\n"
        )
        say(report.table(figures["summary"], report.CLEANUP))
        say(
            "\np99, cleaning ÷ quiet: {ratio:.2f}"
            " ({ratio_low:.2f}–{ratio_high:.2f})".format(**figures)
        )
        if figures["summary"]["quiet"]["p99"] > retention.CALM:
            say(
                "Claims were late in the quiet phases already: this machine is too"
                " busy, or too slow, for this."
            )
        return figures

    def _reaper(self) -> dict[str, Any]:
        figures = retention.measure(
            "reaper", self.cluster, rows=self._share_of(5_000_000)
        )
        say("\n(reaper) {stuck} of {rows:,} records reaped:\n".format(**figures))
        say(report.table(figures["told"], report.REAPER))
        return figures

    def _share_of(self, size: int) -> int:
        return int(size * self.plan.share)


def _titled(figures: dict[str, Any]) -> dict[str, Any]:
    return {contenders.load(name).title: row for name, row in figures.items()}


def say(*texts: str) -> None:
    print(*texts, sep="\n" if "\n" in "".join(texts) else " ", flush=True)
