"""The pytest plugin for ``--idempotency-twice``. It imports Django only if the option
is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from django_idempotency.contrib.testing.twice import Repetition

OPTION = "--idempotency-twice"
IGNORE = "idempotency_twice_ignore"
SENT = pytest.StashKey[list["Repetition"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("django-idempotency")
    group.addoption(
        OPTION,
        nargs="?",
        const="keyed",
        choices=("keyed", "all"),
        help=(
            "Send each request with an idempotency key twice through Django's test"
            " clients, and fail tests in which the second one gets a different response"
            " or changes something. With '=all', give every unsafe request a key."
        ),
    )
    parser.addini(
        IGNORE,
        "Labels of models whose rows are not effects, such as audit.Request.",
        type="args",
        default=[],
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption(OPTION):
        config.pluginmanager.register(_Twice(config), "django-idempotency-twice")


class _Twice:
    def __init__(self, config: pytest.Config) -> None:
        self.options: dict[str, Any] = {
            "every": config.getoption(OPTION) == "all",
            "ignore": config.getini(IGNORE),
        }
        self.sent: Counter[str] = Counter()  # requests sent twice, by method and route
        self.differed: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        item.stash[SENT] = []
        with self._watching(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            with self._watching(item):
                result = yield
        except BaseException:  # the test's own failure has precedence
            item.add_report_section("call", "requests sent twice", _differences(item))
            raise
        if differing := _differences(item):
            pytest.fail(differing, pytrace=False)
        return result

    @contextmanager
    def _watching(self, item: pytest.Item) -> Iterator[None]:
        from django_idempotency.contrib.testing.twice import sending_twice

        with sending_twice(**self.options) as sent:
            try:
                yield
            finally:
                item.stash[SENT] += sent
                item.user_properties += [
                    (OPTION, [f"{one.method} {one.route}", bool(one.differences)])
                    for one in sent
                ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what a test has sent. With pytest-xdist, its workers' reports come to
        the process that sums up.
        """
        if report.when == "teardown":
            sent: list[Any] = [
                value for name, value in report.user_properties if name == OPTION
            ]
            self.sent.update(named for named, _differs in sent)
            self.differed.update(named for named, differs in sent if differs)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that sent nothing twice, because it showed nothing. A worker of
        pytest-xdist leaves that to the process that sums up.
        """
        shows = not (
            hasattr(session.config, "workerinput") or session.config.option.collectonly
        )
        if shows and not self.sent and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter
    ) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("requests sent twice")
        write(
            f"{self.sent.total()} requests were sent twice; {self.differed.total()}"
            " differed the second time",
            red=not self.sent,
        )
        for name, count in sorted(self.differed.items()):
            write(f"{name}: {count} of {self.sent[name]}", red=True)


def _differences(item: pytest.Item) -> str:
    return "\n".join(str(one) for one in item.stash[SENT] if one.differences)
