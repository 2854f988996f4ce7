"""The README and the docs: complete, true where a machine can tell, and their examples run."""

from __future__ import annotations

import ast
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from django.contrib.auth import get_user_model
from django.core.management import BaseCommand, call_command, get_commands, load_command_class
from django.db import connection
from django.dispatch import Signal
from django.http import HttpResponse
from django.test import override_settings

from django_idempotency import checks, conf, events, models, policy, signals
from django_idempotency.decorators import idempotent
from django_idempotency.exceptions import (
    AnonymousKey,
    LateRetry,
    MalformedKey,
    MalformedRequestTime,
    MissingKey,
    NotAdmitted,
    ReplayForbidden,
    RequestIncomplete,
    StoreUnavailable,
)
from django_idempotency.http import problems, published
from django_idempotency.instrumentation import metrics
from django_idempotency.outbox import checks as outbox_checks
from django_idempotency.outcomes import InFlight, Mismatch, OnHold
from django_idempotency.scopes import BuiltInScope
from tests.support.databases import create_database, drop_database
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
REFUSALS = [
    *(MissingKey(), MalformedKey(), AnonymousKey(), MalformedRequestTime(), LateRetry(), StoreUnavailable()),
    *(InFlight(1), OnHold(""), Mismatch(), RequestIncomplete(1, 2), ReplayForbidden(), NotAdmitted(1)),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(name):
    return (DOCS / name).read_text()


def prose(page):
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text())


def headings(page, level):
    return re.findall(rf"^{'#' * level} (.+)$", prose(page), re.MULTILINE)


def slug(heading):
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
    return re.sub(r"[-\s]+", "-", kept)


def section(name, heading):
    """What stands under ``heading``."""
    return re.split(r"^## ", text(name).partition(f"\n## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(markdown):
    """The cells of all tables, heads and rules left out."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    rules = [number for number, line in enumerate(cells) if set("".join(line)) <= set("-: ")]
    heads = {number - 1 for number in rules}
    return [line for number, line in enumerate(cells) if number not in heads.union(rules)]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


# --- Complete, and nothing invented ----------------------------------------------------------------------------------


def default_of(name):
    source = policy.Policy() if name in policy.NAMES else conf.Conf()
    return getattr(source, name)


def same(stated, actual):
    return frozenset(stated) == actual if isinstance(actual, frozenset) else stated == actual


def test_every_setting_is_documented_with_its_default():
    documented = {code(name)[0]: eval(code(default)[0]) for name, default, _ in rows(text("settings.md"))}
    assert documented.keys() == conf.NAMES
    assert {name for name, value in documented.items() if not same(value, default_of(name.lower()))} == set()


def test_every_policy_knob_is_documented_with_its_default():
    knobs = [code(heading)[0] for heading in headings(DOCS / "policy.md", 3)]
    assert sorted(knobs) == sorted(policy.NAMES)
    for name in knobs:
        stated = re.search(rf"^### `{name}`\n\nDefault `([^`]+)`", text("policy.md"), re.MULTILINE)
        assert stated, name
        assert same(eval(stated[1]), default_of(name)), name


def test_the_knobs_that_messages_heed_are_knobs():
    listed = code(section("policy.md", "Consumers").partition("It heeds")[2])
    assert set(listed) <= policy.NAMES


def known_problems():
    made = {problem.code: problem for problem in map(problems.problem, REFUSALS)}
    return made | {problem.code: problem for problem in (problems.NOT_STORED, problems.MARKED_FAILED)}


def test_every_problem_code_there_is_has_an_example_here():
    calls = [node for node in ast.walk(ast.parse(Path(problems.__file__).read_text())) if isinstance(node, ast.Call)]
    assert sum(ast.unparse(call.func) == "Problem" for call in calls) == len(known_problems())


def test_every_problem_code_is_documented_under_its_anchor():
    codes = {heading for heading in headings(DOCS / "errors.md", 2) if "_" in heading or heading == "on_hold"}
    assert codes == known_problems().keys()
    assert all(slug(name) == name for name in codes)


def test_every_problem_code_is_published_under_its_status():
    made = {(str(problem.status), problem.code) for problem in map(problems.problem, REFUSALS)}
    assert {(status, code) for status, codes in published.CODES.items() for code in codes} == made


@pytest.mark.parametrize("problem", known_problems().values(), ids=lambda problem: problem.code)
def test_a_problem_is_documented_as_it_is_answered(problem):
    ((status, retryable, safe_new_key),) = rows(section("errors.md", problem.code))
    expected = "the stored one" if problem is problems.NOT_STORED else str(problem.status)
    assert status == expected
    assert [code(retryable)[0] == "true", code(safe_new_key)[0] == "true"] == [problem.retryable, problem.safe_new_key]


def test_every_check_is_documented():
    package = Path(checks.__file__).parents[1]
    modules = [*package.glob("checks/*.py"), *package.glob("stores/*.py"), Path(outbox_checks.__file__)]
    sources = "".join(path.read_text() for path in modules)
    ids = set(re.findall(r'id="django_idempotency\.(\w+)"', sources))
    assert ids == set(headings(DOCS / "checks.md", 2))


def test_every_signal_is_documented_with_what_it_carries():
    source = Path(signals.__file__).read_text()
    documented = {code(name)[0]: code(carries) for name, _when, carries in rows(text("signals.md"))}
    assert documented.keys() == {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    for name, carries in documented.items():
        comment = re.search(rf"^{name} = Signal\(\)(.*)$", source, re.MULTILINE)[1]
        assert all(argument in comment for argument in carries), name


def test_every_metric_is_documented_as_it_is():
    counted = {code(name)[0]: meaning for name, meaning in rows(section("monitoring.md", "What is counted"))[:-1]}
    assert counted == {
        metrics.in_prometheus(counter): counter.meaning for counter in (*metrics.COUNTERS, *metrics.OUTBOX_COUNTERS)
    } | {str(event.reason): event.meaning for event in events.EVENTS if event.reason}
    others = [
        rows(section("monitoring.md", "What is counted"))[-1],
        *rows(section("monitoring.md", "Figures of the table")),
    ]
    assert {code(name)[0]: meaning for name, meaning in others} == {
        metrics.in_prometheus(metric): metric.meaning
        for metric in (metrics.RUN, *metrics.GAUGES, metrics.TABLE_UP, *metrics.OUTBOX_GAUGES)
    }


def test_every_alert_is_documented():
    alerts = re.findall(r"- alert: (\w+)", text("monitoring/alerts.yml"))
    assert headings(DOCS / "runbooks.md", 2) == alerts
    for alert in alerts:
        parts = re.findall(r"^- \*\*(\w+)\*\*: ", section("runbooks.md", alert), re.MULTILINE)
        assert parts == ["Means", "Look", "Do", "Clients"], alert


def test_every_event_in_the_log_is_documented_with_its_level():
    documented = {(code(event)[0], level) for event, level, _meaning in rows(section("monitoring.md", "Logs"))}
    calls = [
        ast.unparse(node)
        for module in Path(events.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "log"
    ]
    called = {(match[2], match[1]) for call in calls if (match := re.match(r"log\(logging\.(\w+), '(\w+)'", call))}
    raised = {
        (event.name, logging.getLevelName(event.level))
        for event in (*events.EVENTS, *events.OUTBOX_EVENTS)
        if event.level
    }
    assert documented == called | raised


COMMANDS = sorted(name for name, app in get_commands().items() if app == "django_idempotency")


def options_of(command):
    return {name for action in command.create_parser("manage.py", "it")._actions for name in action.option_strings}


def test_every_command_is_documented():
    assert sorted(heading for heading in headings(DOCS / "maintenance.md", 2) if "_" in heading) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_documented(name):
    shared = options_of(BaseCommand()) | {"--database", "--json"}
    documented = {code(option)[0] for option, _meaning in rows(section("maintenance.md", name))}
    assert documented == options_of(load_command_class("django_idempotency", name)) - shared


def test_the_table_of_legal_moves_is_the_one_in_force():
    stated = {before: set(re.findall(r"`(\w+)`|\b(absent)\b", after)) for before, after in legal_moves()}
    stated = {before: {quoted or bare for quoted, bare in after} for before, after in stated.items()}
    expired = stated.pop("expired `completed` or `failed`")
    assert expired == named(models.MOVES_ONCE_EXPIRED)
    decided = {"started": "`started`", "failed": "`failed` without a response"}
    for before, after in models.MOVES_BY_DECISION.items():
        assert stated.pop(f"{decided[before]}, by an operator's decision") == named(after)
    assert stated == {f"`{b}`" if b else "absent": named(after) for b, after in models.MOVES.items()}


def legal_moves():
    start = text("internals.md").partition("The moves that a record can make")[2]
    return rows(start.partition("CHECK constraints")[0])


def named(statuses):
    return {str(status or "absent") for status in statuses}


def test_the_figures_of_the_comparison_are_those_of_the_page_on_performance():
    measured = headed(section("performance.md", "Timed"))
    shown = headed(section("comparison.md", "What it costs"))
    assert len(shown) > 30
    assert shown.items() <= measured.items()
    (wal,) = (
        row[4] for row in rows(section("performance.md", "Counted")) if row[0] == "ours, atomic" and "+" in row[4]
    )
    assert f"{int(wal):,} bytes of WAL" in section("comparison.md", "Where this package loses")


def headed(markdown):
    """The cells of all tables, by the heads of table and column and of row."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]
    cells, head = {}, []
    for number, line in enumerate(lines):
        if number + 1 < len(lines) and set("".join(lines[number + 1])) <= set("-:"):
            head = line
        elif not set("".join(line)) <= set("-:"):
            cells |= {(head[0], name, line[0]): cell for name, cell in zip(head[1:], line[1:], strict=True)}
    return cells


# --- Links and words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_somewhere(page):
    dead = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not leads_somewhere(page, link)]
    assert dead == []


def leads_somewhere(page, link):
    if link.startswith("https://"):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_file():
        return False
    return not anchor or anchor in {slug(heading) for level in (1, 2, 3) for heading in headings(target, level)}


def test_every_page_can_be_reached():
    reached = {(DOCS / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", text("index.md"))}
    assert {page.resolve() for page in DOCS.rglob("*.md")} - reached <= {DOCS / "index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_tells_of_the_machine_it_was_written_on(page):
    words = page.read_text()
    assert [place for place in (str(ROOT), str(Path.home()) + "/") if place in words] == []
    assert re.findall(r"/(?:home|root|tmp|Users)/", words) == []


def test_every_page_is_in_the_navigation_and_listed_for_language_models():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    navigation = (ROOT / "properdocs.yml").read_text().partition("nav:\n")[2].partition("markdown_extensions")[0]
    assert sorted(re.findall(r"([\w/]+\.md)$", navigation, re.MULTILINE)) == sorted(pages)
    listed = re.findall(r"^- \[(.+?)\]\((.+?)\)", text("llms.txt"), re.MULTILINE)
    assert sorted(listed) == sorted((headings(DOCS / page, 1)[0], address(page)) for page in pages - {"index.md"})


def address(page):
    """Where the page is on the site."""
    return f"https://django-idempotency.readthedocs.io/en/stable/{page.removesuffix('.md').removesuffix('/index')}/"


def test_named_tests_exist():
    named = {name for page in PAGES for name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())}
    assert {path for path, _name in named if not (ROOT / path).is_file()} == set()
    defined = {
        (path, name): re.search(rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.M) for path, name in named
    }
    assert {place for place, found in defined.items() if place[1] and not found} == set()


def test_what_only_a_clone_can_run_says_so():
    """Whoever has installed the package has neither the Makefile nor the test project."""
    needs_a_clone = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:make |python -m (?:testproject|tests|pytest))", re.MULTILINE)
    pages = [page for page in PAGES if needs_a_clone.search(page.read_text())]
    assert pages
    assert [page.name for page in pages if "a clone of the repository" not in page.read_text()] == []


# --- Examples --------------------------------------------------------------------------------------------------------


def needs(example):
    extras = {
        "rest_framework": pytest.mark.drf,
        "celery": pytest.mark.celery,
        "corsheaders": pytest.mark.cors,
        "consumers.rabbitmq": pytest.mark.celery,
        "import redis": pytest.mark.server,
        "import httpx": pytest.mark.httpx,
        "import requests": pytest.mark.requests,
        "consumers.nats": pytest.mark.nats,
        "consumers.kafka": pytest.mark.kafka,
        "consumers.sqs": pytest.mark.sqs,
        "consumers.webhooks": pytest.mark.webhooks,
        "from mcp": pytest.mark.mcp,
        "django.tasks": pytest.mark.django_tasks,
        "django_idempotency.tasks": pytest.mark.celery,
        "django_idempotency.outbox.tasks": pytest.mark.celery,
        "prometheus_client": pytest.mark.prometheus,
        "instrumentation.prometheus": pytest.mark.prometheus,
    }
    return [mark for package, mark in extras.items() if package in example]


def examples():
    for page in PAGES:
        for number, (language, block) in enumerate(FENCE.findall(page.read_text()), start=1):
            if (
                language == "python"
                and not page.name.startswith("quickstart")
                and ("ninja" not in block or find_spec("ninja"))
            ):
                yield pytest.param(block, marks=needs(block), id=f"{page.relative_to(ROOT)}-{number}")


def run(example):
    names = {"__name__": "example"}
    exec(compile(example, "example", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_runs(example):
    names = run(example)
    if "IDEMPOTENCY" in names:
        with override_settings(IDEMPOTENCY=names["IDEMPOTENCY"]):
            assert conf.conf()


def interrupted(request):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("transactional_db")
def test_a_key_on_hold_is_freed_as_the_page_on_the_admin_says(rf):
    request = rf.post("/", headers={"Idempotency-Key": "order-1"})
    entry_point = {"mode": "lease", "on_crash": "hold", "scope": lambda request: BuiltInScope("auth.user:7")}
    with pytest.raises(KeyboardInterrupt):
        idempotent(**entry_point)(interrupted)(request)
    view = idempotent(**entry_point)(lambda request: HttpResponse("done"))
    assert view(request).status_code == 409
    (block,) = [block for language, block in FENCE.findall(text("admin.md")) if language == "console"]
    get_user_model().objects.create_superuser("anna")
    for line in block.splitlines():
        call_command(*shlex.split(line.partition("manage.py ")[2]))
    assert view(request).content == b"done"


# --- The quickstart, as it stands ------------------------------------------------------------------------------------


class Reader:
    """Does what the page says, in an empty directory. ``python`` finds the package at ``path``, or by itself."""

    def __init__(self, directory, python=sys.executable, path=str(ROOT)):
        self.directory = directory
        self.python = python
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        self.environment = inherited | {"PYTHONPATH": path}
        self.databases: list[str] = []
        self.replaced: dict[str, str] = {}
        self.warnings = "error"
        self.server = None
        self.shown = 0

    def write(self, block):
        path, _, where = block.partition("\n")[0].removeprefix("# ").partition(", ")
        file = self.directory / path
        for written, meant in self.replaced.items():
            block = block.replace(written, meant)
        file.write_text((file.read_text() if where else "") + block)

    def type(self, block):
        for command, _, output in (part.partition("\n") for part in block.strip().removeprefix("$ ").split("\n$ ")):
            program, *arguments = shlex.split(command)
            match program, arguments:
                case "curl", _:
                    self.expect(self.curl(*arguments), output)
                case "python", [manage, "runserver"]:
                    self.serve(manage)
                case "python", _:
                    self.run(*arguments)
                case "django-admin", _:
                    self.run("-m", "django", *arguments)
                case "pip", ["install", *_]:
                    pass  # it is what runs here
                case "createdb", [name]:
                    self.databases.append(name)
                case _:
                    pytest.fail(f"Nobody knows how to type {command!r}.")

    def run(self, *arguments):
        done = subprocess.run(
            [self.python, "-W", self.warnings, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def serve(self, manage):
        self.server = subprocess.Popen(
            [self.python, manage, "runserver", "--noreload", str(self.port)],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self.is_serving)

    def stop_serving(self):
        if self.server:
            self.server.terminate()
            self.server.wait(10)

    def is_serving(self):
        assert self.server.poll() is None, "the server has ended"
        try:
            return self.curl("-i", "http://127.0.0.1:8000/")
        except URLError:
            return None

    def curl(self, flag, url, *options):
        assert flag == "-i"
        pairs = list(zip(options[::2], options[1::2], strict=True))
        headers = dict(value.split(": ", 1) for option, value in pairs if option == "-H")
        body = "&".join(value for option, value in pairs if option == "-d").encode() or None
        request = Request(url.replace("8000", str(self.port)), data=body, headers=headers)
        try:
            answer = urlopen(request, timeout=30)
        except HTTPError as error:
            answer = error
        with answer:
            head = [f"HTTP/1.1 {answer.status} {answer.reason}", *map(": ".join, answer.headers.items())]
            return "\n".join([*head, "", answer.read().decode()])

    def expect(self, answer, lines):
        for line in lines.splitlines():
            # Pythons differ in the words for 422.
            line = re.sub(r"^(HTTP/1.1 \d+) .*", r"\1", line)
            assert line in answer, f"{line!r} is not in:\n{answer}"
            self.shown += 1


@contextmanager
def reader(directory, **found):
    someone = Reader(directory, **found)
    try:
        yield someone
    finally:
        someone.stop_serving()


def test_the_quickstart_does_what_it_shows(tmp_path):
    with reader(tmp_path) as someone:
        follow_the_quickstart(someone)


def follow_the_quickstart(someone, page="quickstart.md"):
    for language, block in FENCE.findall(text(page)):
        {"python": someone.write, "console": someone.type}[language](block)
    assert someone.shown > 8


@contextmanager
def reader_with_postgresql(directory, **found):
    """A reader who has a PostgreSQL server, and makes a database there that has another name than on the page."""
    server, name = connection.settings_dict, f"{connection.settings_dict['NAME']}_shop"
    libpq = {"PGHOST": server["HOST"], "PGPORT": server["PORT"], "PGUSER": server["USER"]}
    create_database(name, directory)
    try:
        with reader(directory, **found) as someone:
            someone.environment |= {variable: str(value) for variable, value in libpq.items() if value}
            someone.environment |= {"PGPASSWORD": server["PASSWORD"]} if server["PASSWORD"] else {}
            someone.replaced = {'"NAME": "shop"': f'"NAME": "{name}"'}
            yield someone
    finally:
        drop_database(name)


@pytest.mark.drf
@pytest.mark.psycopg3
@pytest.mark.postgresql
def test_the_quickstart_for_rest_framework_does_what_it_shows(tmp_path, db):
    with reader_with_postgresql(tmp_path) as someone:
        follow_the_quickstart(someone, "quickstart_drf.md")
        assert someone.databases == ["shop"]
