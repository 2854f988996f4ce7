"""What a request costs the application, in one process and one thread, without a server around it.

It counts calls of functions, which vary little, and measures the process's processor time, in interleaved rounds.
``--items lock`` tells where in the package the time of one kind of request goes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from itertools import count
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

from testproject.benchmarks import contenders, report, servers
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.servers import BODY, DIRECTORY, PATH

BASELINE = "unprotected"
WARM_UP, COUNTED, TURN = 200, 100, 300  # requests
SAMPLE, SAMPLED = 0.001, 10  # seconds of processor time: between samples, at least; in all
PACKAGE = "django_idempotency"
NAMED = (PACKAGE, "rest_framework", "psycopg", "django")


class Kind(NamedTuple):
    """A kind of request: which contender it goes to, and whether its key is known."""

    contender: str
    replay: bool = False


KINDS = {
    "constant": Kind("constant"),
    BASELINE: Kind("unprotected"),
    "record": Kind("atomic"),
    "lock": Kind("lock"),
    "replay-record": Kind("atomic", replay=True),
    "replay-lock": Kind("lock", replay=True),
    "replay-cached": Kind("cached_in_process", replay=True),
}
CALLS_THE_VIEW = ("_Run.dispatch", "_Run._handle")  # including REST framework
CALLS = {
    "python": ("Python calls", "{:.0f}"),
    "c": ("C calls", "{:.0f}"),
    **{name: (f"in {name}", "{:.0f}") for name in (*NAMED, "others")},
}
TIMES = {
    "cpu": ("µs", "{:.0f}"),
    "more": ("µs more", "{:+.0f}"),
    "ratio": ("× by CPU", "{:.3f}"),
    "ratio_low": ("lowest", "{:.3f}"),
    "ratio_high": ("highest", "{:.3f}"),
}
ITEMS = {"cpu": ("µs", "{:.0f}"), "share": ("%", "{:.1f}")}


def main() -> None:
    from testproject.benchmarks.__main__ import alone, unpacked

    parser = argparse.ArgumentParser(prog="python -m testproject.benchmarks.profiling", description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--against", nargs="+", metavar="VERSION", default=[], help="as of the benchmark")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--items", nargs="*", choices=KINDS, default=[], help="where the time of these goes")
    options = parser.parse_args()
    with alone(), ExitStack() as stack:
        cluster = Cluster(DIRECTORY / "postgresql")
        names = list(_with_versions(options.kinds, unpacked(options.against)))
        processes = {name: stack.enter_context(_process(name, cluster)) for name in names}
        print(report.table({name: process("calls") for name, process in processes.items()}, CALLS, first="calls"))
        turns = [{name: process("time") for name, process in processes.items()} for _ in range(options.rounds)]
        print("\n" + report.table(_summary(turns), TIMES, first="processor time"))
        for name in options.items:
            print("\n" + report.table(processes[name]("items"), ITEMS, first=f"{name}: where"))


def _with_versions(names: Sequence[str], versions: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield name
        if contenders.is_ours(KINDS[name].contender):
            yield from (f"{name}@{version}" for version in versions)


@contextmanager
def _process(name: str, cluster: Cluster) -> Iterator[Callable[[str], Any]]:
    """Yield a process that serves one kind of request. Call it with what it is to do."""
    kind, at, version = name.partition("@")
    contender, database = f"{KINDS[kind].contender}{at}{version}", servers.database(f"profiled_{name}")
    cluster.create(database)
    servers.make_tables(contender, cluster, database)
    with subprocess.Popen(
        [sys.executable, "-m", "testproject.benchmarks.profiling", "serve", f"{KINDS[kind].replay:d}"],
        cwd=servers.home(contender),
        env=servers.environ(contender, cluster, None, database),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def do(what: str) -> Any:
            print(what, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())  # type: ignore[union-attr]

        try:
            yield do
        finally:
            process.stdin.close()
            process.wait()
            cluster.drop(database)


def _summary(turns: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: _figures(name, turns) for name in turns[0]}


def _figures(name: str, turns: Sequence[Mapping[str, float]]) -> dict[str, float]:
    told = {"cpu": median(turn[name] for turn in turns)}
    if BASELINE in turns[0]:
        ratios = [turn[BASELINE] / turn[name] for turn in turns]
        more = median(turn[name] - turn[BASELINE] for turn in turns)
        told |= {"more": more, "ratio": median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios)}
    return told


# --- In a process of its own, which is the contender's project -------------------------------------------------------


def serve(replay: bool) -> None:
    from django.core.wsgi import get_wsgi_application

    request = _Requests(get_wsgi_application(), replay)
    request.run(WARM_UP)
    tasks = {"time": request.time, "calls": request.calls, "items": request.items}
    for line in sys.stdin:
        print(json.dumps(tasks[line.strip()]()), flush=True)


class _Requests:
    def __init__(self, application: Callable[..., Any], replay: bool) -> None:
        self.application = application
        self.numbers = iter(lambda: 0, 1) if replay else count()
        self.run_id = os.urandom(4).hex()

    def run(self, requests: int) -> None:
        for _ in range(requests):
            self._request(f"{self.run_id}-0000-4000-8000-{next(self.numbers):012x}")

    def _request(self, key: str) -> None:
        body = BODY.encode()
        environ = {
            "REQUEST_METHOD": "POST",
            "PATH_INFO": PATH,
            "SCRIPT_NAME": "",
            "QUERY_STRING": "",
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": "80",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "CONTENT_TYPE": "application/json",
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_HOST": "127.0.0.1",
            "HTTP_IDEMPOTENCY_KEY": key,
            "REMOTE_ADDR": "127.0.0.1",
            "wsgi.url_scheme": "http",
            "wsgi.input": BytesIO(body),
            "wsgi.errors": sys.stderr,
        }
        told: list[str] = []
        response = self.application(environ, lambda status, _headers: told.append(status))
        assert b"".join(response)
        response.close()
        assert told[0].startswith("201"), told

    def time(self) -> float:
        """Return the microseconds of processor time for a request, of all threads of this process."""
        begun = time.process_time()
        self.run(TURN)
        return (time.process_time() - begun) / TURN * 1e6

    def calls(self) -> dict[str, float]:
        """Return the calls a request makes in Python and in C, by package: the callee's or, for C, the caller's."""
        seen: Counter[str] = Counter()

        def note(frame: FrameType, event: str, _argument: object) -> None:
            if event in ("call", "c_call"):
                seen["python" if event == "call" else "c"] += 1
                seen[_package(frame.f_code.co_filename)] += 1

        sys.setprofile(note)
        try:
            self.run(COUNTED)
        finally:
            sys.setprofile(None)
        return {name: number / COUNTED for name, number in seen.items()}

    def items(self) -> dict[str, dict[str, float]]:
        """Return the sixteen functions of the package that take the most time, with what they call outside of it."""
        seen: Counter[str] = Counter()
        signal.signal(signal.SIGPROF, lambda _number, frame: seen.update([_innermost(frame)]))
        signal.setitimer(signal.ITIMER_PROF, SAMPLE, SAMPLE)
        begun, requests = time.process_time(), 0
        while time.process_time() - begun < SAMPLED:
            self.run(TURN)
            requests += TURN
        signal.setitimer(signal.ITIMER_PROF, 0)
        spent = (time.process_time() - begun) / requests * 1e6
        shares = {name: times / seen.total() for name, times in seen.most_common(16)}
        return {name: {"cpu": share * spent, "share": 100 * share} for name, share in shares.items()}


def _package(filename: str) -> str:
    parts = Path(filename).parts
    return next((name for name in NAMED if name in parts), "others")


def _innermost(frame: FrameType | None) -> str:
    """Return the function of the package that is running, or that has called what is running."""
    while frame is not None:
        path, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if f"/{PACKAGE}/" in path:
            module = path.rpartition(f"/{PACKAGE}/")[2].removesuffix(".py").replace("/", ".")
            return "the view" if function in CALLS_THE_VIEW else f"{module}.{function}"
        frame = frame.f_back
    return "around the view"


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2] == "1")
    else:
        main()
