"""The README and the docs: complete, true where a machine can tell, and their examples
run.
"""

from __future__ import annotations

import argparse
import ast
import base64
import dataclasses
import logging
import os
import re
import shlex
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.core.management import (
    BaseCommand,
    call_command,
    get_commands,
    load_command_class,
)
from django.http import HttpResponse
from django.test import override_settings

from django_idempotency import conf
from django_idempotency.checks.registry import registered
from django_idempotency.contrib.cached import CacheOptions
from django_idempotency.contrib.dashboard.conf import DashboardOptions
from django_idempotency.contrib.outbox import signals as outbox_signals
from django_idempotency.contrib.outbox.conf import OutboxOptions
from django_idempotency.contrib.redis.client import RedisOptions
from django_idempotency.contrib.steps import signals as step_signals
from django_idempotency.http.placement import idempotent
from django_idempotency.instrumentation import metrics
from django_idempotency.reporting import events
from django_idempotency.values import policy, problems
from django_idempotency.values.exceptions import (
    AnonymousKey,
    MalformedKey,
    MissingKey,
    NotAdmitted,
    ReplayForbidden,
    RequestIncomplete,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import InFlight, Mismatch, OnHold
from django_idempotency.values.policy import (
    Atomic,
    Body,
    Fingerprint,
    Key,
    Lease,
    Limits,
)
from django_idempotency.values.rules import rules
from django_idempotency.values.scopes import BuiltInScope
from tests.support.pages import (
    DOCS,
    FENCE,
    ROOT,
    anchors,
    code,
    headings,
    prose,
    rows,
    section,
    slug,
    text,
)
from tests.support.reader import follow_the_quickstart, reader_with_postgresql

PACKAGE = ROOT / "django_idempotency"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
REFUSALS = [
    *(MissingKey(), MalformedKey(), AnonymousKey(), StoreUnavailable()),
    *(
        InFlight(1),
        OnHold(""),
        Mismatch(),
        RequestIncomplete(1, 2),
        ReplayForbidden(),
        NotAdmitted(1),
    ),
]


GROUPS = [Atomic, Lease, Key, Fingerprint, Body, Limits]


def defaults(options):
    """What stands in the declaration of each option."""
    declared = [
        field for field in dataclasses.fields(options) if "rule" in field.metadata
    ]
    return {
        f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
        for f in declared
    }


def same(stated, actual):
    return (
        frozenset(stated) == actual
        if isinstance(actual, frozenset)
        else stated == actual
    )


def test_every_setting_is_documented_with_its_default():
    documented = {
        code(name)[0]: eval(code(default)[0])
        for name, default, _ in rows(section("settings.md", "Options of the project"))
    }
    actual = {name.upper(): value for name, value in defaults(conf.Conf).items()}
    assert documented == actual
    assert actual.keys() | set(settings_of_a_policy()) == conf.NAMES


def settings_of_a_policy():
    """Their defaults are those of the policy's options."""
    listed = section("settings.md", "Options of a policy").partition("consumers:")[2]
    names = code(listed.partition(". ")[0])
    assert names == sorted(name.upper() for name in defaults(policy.Policy))
    return names


def test_every_option_of_a_policy_is_documented_with_its_default():
    tables = section("policy.md", "The options")
    documented = {
        code(name)[0]: eval(code(default)[0]) for name, default, _what in rows(tables)
    }
    of_groups = {
        f"{group.__name__}.{name}": of
        for group in GROUPS
        for name, of in defaults(group).items()
    }
    actual = defaults(policy.Policy) | of_groups
    assert documented.keys() == actual.keys()
    assert {
        name for name, value in documented.items() if not same(value, actual[name])
    } == set()


@pytest.mark.parametrize(
    ("page", "heading", "options"),
    [
        ("outbox.md", "Options", OutboxOptions),
        ("dashboard.md", "Options", DashboardOptions),
        ("stores.md", "Redis", RedisOptions),
        ("stores.md", "A cache in front", CacheOptions),
    ],
)
def test_every_option_of_a_wing_is_documented_with_its_default(page, heading, options):
    table = section(page, heading).partition("| Default |")[2]
    documented = {
        code(row[0])[0].lower(): eval((code(row[1]) or ["None"])[0])
        for row in rows(table.partition("\n\n")[0])
    }
    of_bases = {name for base in options.__bases__ for name in vars(base)}
    actual = defaults(options)
    assert documented == {name: actual[name] for name in actual.keys() - of_bases}


def test_every_option_of_a_policy_has_an_anchor():
    of_groups = {
        slug(f"{group.__name__}.{name}") for group in GROUPS for name in defaults(group)
    }
    assert rules(policy.Policy).keys() | of_groups <= anchors(DOCS / "policy.md")


def test_the_options_that_messages_use_are_options():
    listed = code(section("policy.md", "Consumers").partition("It uses")[2])
    assert set(listed) <= rules(policy.Policy).keys()


def known_problems():
    made = {problem.code: problem for problem in map(problems.problem, REFUSALS)}
    return made | {
        problem.code: problem
        for problem in (problems.NOT_STORED, problems.MARKED_FAILED)
    }


def test_every_problem_code_there_is_has_an_example_here():
    calls = [
        node
        for node in ast.walk(ast.parse(Path(problems.__file__).read_text()))
        if isinstance(node, ast.Call)
    ]
    assert sum(ast.unparse(call.func) == "Problem" for call in calls) == len(
        known_problems()
    )


def test_every_problem_code_is_documented_under_its_anchor():
    codes = {
        heading
        for heading in headings(DOCS / "errors.md", 2)
        if "_" in heading or heading == "on_hold"
    }
    assert codes == known_problems().keys()
    assert all(slug(name) == name for name in codes)


@pytest.mark.parametrize(
    "problem", known_problems().values(), ids=lambda problem: problem.code
)
def test_a_problem_is_documented_as_it_is_sent(problem):
    table = {
        code(name)[0]: stated
        for name, *stated in rows(section("errors.md", "The codes"))
    }
    status, retryable, safe_new_key = table[problem.code]
    expected = (
        "the stored one" if problem is problems.NOT_STORED else str(problem.status)
    )
    assert status == expected
    assert [code(retryable)[0] == "true", code(safe_new_key)[0] == "true"] == [
        problem.retryable,
        problem.safe_new_key,
    ]


def test_every_check_is_documented():
    for table in registered.values():
        documented = headings(DOCS / f"{table.page}.md", 3)
        ids = dict.fromkeys(check.id for check in table.rows)
        assert [
            found[0]
            for heading in documented
            if (found := re.match(r"[EW]\d{3}\b", heading))
        ] == list(ids)


def test_every_signal_is_documented_with_what_it_carries():
    source = "".join(path.read_text() for path in PACKAGE.rglob("signals.py"))
    documented = {
        code(name)[0]: code(carries)
        for name, _when, carries in rows(text("signals.md"))
    }
    assert documented.keys() == set(
        re.findall(r"^(\w+) = Signal\(\)", source, re.MULTILINE)
    )
    for name, carries in documented.items():
        comments = re.search(
            rf"((?:^#.*\n)*)^{name} = Signal\(\)(.*)$", source, re.MULTILINE
        )
        assert all(argument in "".join(comments.groups()) for argument in carries), name


def test_every_metric_is_documented_as_it_is():
    counted = {
        code(name)[0]: meaning
        for name, meaning in rows(section("metrics.md", "What is counted"))[:-1]
    }
    assert counted == {
        metrics.in_prometheus(counter): counter.meaning
        for counter in (
            *metrics.counters_of(None),
            *metrics.counters_of(outbox_signals.FAMILY),
            *metrics.counters_of(step_signals.FAMILY),
        )
    } | {str(event.reason): event.meaning for event in events.EVENTS if event.reason}
    others = [
        rows(section("metrics.md", "What is counted"))[-1],
        *rows(section("metrics.md", "Figures of the table")),
    ]
    assert {code(name)[0]: meaning for name, meaning in others} == {
        metrics.in_prometheus(metric): metric.meaning
        for metric in (
            metrics.RUN,
            *(gauge for family in metrics.gauge_families for gauge in family.gauges),
        )
    }


def test_every_alert_is_documented():
    alerts = re.findall(r"- alert: (\w+)", text("monitoring/alerts.yml"))
    assert headings(DOCS / "runbooks.md", 2) == alerts
    for alert in alerts:
        parts = re.findall(
            r"^- \*\*(\w+)\*\*: ", section("runbooks.md", alert), re.MULTILINE
        )
        assert parts == ["Means", "Look", "Do", "Clients"], alert


# that of runners names their consumer
LOG_CALL = re.compile(r"((?:self\._)?log)\(logging\.(\w+), '(\w+)', (.*)", re.DOTALL)


def log_calls():
    """The calls that log an event: the function, level, event and other arguments."""
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            if match := LOG_CALL.match(call):
                yield match.groups()


# of a table, a cache, a thread or a relay
ABOUT_NO_REQUEST = {
    "admin",
    "background",
    "cache_error",
    "database_unavailable",
    "half_way",
    "no_function",
    "no_partition",
    "outbox_publisher",
    "outbox_relay",
    "outbox_renewal",
    "table_down",
    "task_acknowledged_early",  # names the task
}


def test_every_log_record_about_a_request_or_message_names_its_view():
    nameless = {
        event
        for function, _level, event, rest in log_calls()
        if function == "log" and not re.search(r"\b(operation|view)=", rest)
    }
    assert nameless == ABOUT_NO_REQUEST


def test_every_event_in_the_log_is_documented_with_its_level():
    documented = {
        (event, level)
        for events, level, _meaning in rows(section("metrics.md", "Logs"))
        for event in code(events)
    }
    called = {(event, level) for _function, level, event, _rest in log_calls()}
    raised = {
        (event.name, logging.getLevelName(event.level))
        for event in (
            *events.EVENTS,
            *outbox_signals.FAMILY.events,
            *step_signals.FAMILY.events,
        )
        if event.level
    }
    assert documented == called | raised


COMMANDS = {
    name: app
    for name, app in get_commands().items()
    if app.startswith("django_idempotency")
    and app != "django_idempotency.contrib.outbox"
}


def options_of(command):
    """The options of a command, and of all its actions."""
    parsers = [command.create_parser("manage.py", "it")]
    for parser in parsers:
        actions = [
            action
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        parsers += [each for action in actions for each in action.choices.values()]
    return {
        name
        for parser in parsers
        for action in parser._actions
        for name in action.option_strings
    }


def test_every_command_is_documented():
    assert sorted(
        heading for heading in headings(DOCS / "maintenance.md", 2) if "_" in heading
    ) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_documented(name):
    options = options_of(load_command_class(COMMANDS[name], name))
    shared = documented_options("Shared options") | options_of(BaseCommand())
    assert documented_options(name) == options - shared


def documented_options(heading):
    return {
        name
        for options, _meaning in rows(section("maintenance.md", heading))
        for name in code(options)
    }


def test_shared_options_are_those_of_several_commands():
    counted = Counter(
        option
        for name, app in COMMANDS.items()
        for option in options_of(load_command_class(app, name))
    )
    assert {n for n in documented_options("Shared options") if counted[n] < 2} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_lead_somewhere(page):
    dead = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))
        if not leads_somewhere(page, link)
    ]
    assert dead == []


def leads_somewhere(page, link):
    if link.startswith("https://"):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.is_file():
        return False
    return not anchor or anchor in anchors(target)


def test_the_home_page_leads_to_the_evidence():
    """All other pages are in the navigation."""
    reached = {
        (DOCS / link.partition("#")[0]).resolve()
        for link in re.findall(r"\]\(([^)\s]+)\)", text("index.md"))
    }
    assert {page.resolve() for page in DOCS.glob("evidence/*.md")} <= reached


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_do_not_name_the_machine_they_were_written_on(page):
    words = page.read_text()
    assert [
        place for place in (str(ROOT), str(Path.home()) + "/") if place in words
    ] == []
    assert re.findall(r"/(?:home|root|tmp|Users)/", words) == []


def test_every_page_is_in_the_navigation_and_listed_for_language_models():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    navigation = (
        (ROOT / "properdocs.yml")
        .read_text()
        .partition("nav:\n")[2]
        .partition("markdown_extensions")[0]
    )
    # the home page leads there
    apart = {page for page in pages if page.startswith("evidence/")}
    assert sorted(re.findall(r"([\w/]+\.md)$", navigation, re.MULTILINE)) == sorted(
        pages - apart
    )
    listed = re.findall(r"^- \[(.+?)\]\((.+?)\)", text("llms.txt"), re.MULTILINE)
    assert sorted(listed) == sorted(
        (headings(DOCS / page, 1)[0], address(page)) for page in pages - {"index.md"}
    )


def address(page):
    """Where the page is on the site."""
    return f"https://django-idempotency.readthedocs.io/en/stable/{page.removesuffix('.md').removesuffix('/index')}/"


def test_named_tests_exist():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text())
    }
    assert {path for path, _name in named if not (ROOT / path).is_file()} == set()
    defined = {
        (path, name): re.search(
            rf"^(?:def|class) {name}\b", (ROOT / path).read_text(), re.M
        )
        for path, name in named
    }
    assert {
        place for place, found in defined.items() if place[1] and not found
    } == set()


def test_pages_with_commands_that_need_a_clone_say_so():
    """An installation of the package has neither the Makefile nor the test project."""
    needs_a_clone = re.compile(
        r"^(?:\$ )?(?:\w+=\S+ )*(?:make |python -m (?:testproject|tests|pytest))",
        re.MULTILINE,
    )
    pages = [page for page in PAGES if needs_a_clone.search(page.read_text())]
    assert pages
    assert [
        page.name
        for page in pages
        if "a clone of the repository" not in page.read_text()
    ] == []


ODD = re.compile(
    r"\b(burns? no|comes? again|doors?|heeds?|is away|is to be|knobs?|of ours|what"
    r" becomes of|whoever)\b",
    re.IGNORECASE,
)


def texts():
    """What users read: pages, alerts, and the strings of the package, docstrings
    included.
    """
    pages = [
        *PAGES,
        *ROOT.glob("*.md"),
        DOCS / "llms.txt",
        DOCS / "monitoring" / "alerts.yml",
    ]
    yield from ((page, page.read_text()) for page in [*pages, *PACKAGE.rglob("*.html")])
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module, node.value


def test_texts_avoid_words_that_a_native_speaker_would_not_use():
    assert [
        (str(path), found[0])
        for path, written in texts()
        if (found := ODD.search(written))
    ] == []


# --- Examples -------------------------------------------------------------------------


def needs(example):
    extras = {
        "rest_framework": pytest.mark.drf,
        "celery": pytest.mark.celery,
        "corsheaders": pytest.mark.cors,
        "contrib.rabbitmq": pytest.mark.celery,
        "import redis": pytest.mark.server,
        "import httpx": pytest.mark.httpx,
        "import requests": pytest.mark.requests,
        "contrib.nats": pytest.mark.nats,
        **dict.fromkeys(
            ("from rq", "huey", "dramatiq", "procrastinate"), pytest.mark.queues
        ),
        "contrib.kafka": pytest.mark.kafka,
        "contrib.sqs": pytest.mark.sqs,
        "from mcp": pytest.mark.mcp,
        "django.tasks": pytest.mark.django_tasks,
        "django_idempotency.tasks": pytest.mark.celery,
        "prometheus_client": pytest.mark.prometheus,
        "instrumentation.prometheus": pytest.mark.prometheus,
    }
    return [mark for package, mark in extras.items() if package in example]


def examples():
    for page in PAGES:
        for number, (language, block) in enumerate(
            FENCE.findall(page.read_text()), start=1
        ):
            if (
                language == "python"
                # their tests are elsewhere
                and not page.name.startswith(("quickstart", "stripe", "body_keys"))
                and all(
                    map(
                        find_spec,
                        re.findall(
                            r"^(?:import|from) (ninja|stripe)\b", block, re.MULTILINE
                        ),
                    )
                )
            ):
                yield pytest.param(
                    block, marks=needs(block), id=f"{page.relative_to(ROOT)}-{number}"
                )


def run(example):
    names = {"__name__": "example"}
    exec(compile(example, "example", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("example", list(examples()))
def test_an_example_runs(example, monkeypatch):
    for name in re.findall(r'os\.environ\["(\w+)"\]', example):
        monkeypatch.setenv(name, base64.b64encode(os.urandom(conf.KEY_LENGTH)).decode())
    names = run(example)
    if "IDEMPOTENCY" in names:
        with override_settings(IDEMPOTENCY=names["IDEMPOTENCY"]):
            assert conf.conf()


def test_pages_hide_keys_that_could_be_copied():
    assert [
        str(page)
        for page in PAGES
        if re.search(r'"[A-Za-z0-9+/_-]{43}="', page.read_text())
    ] == []


def interrupted(request):
    raise KeyboardInterrupt


@pytest.mark.usefixtures("transactional_db")
def test_a_key_on_hold_is_freed_as_the_page_on_the_admin_says(rf):
    request = rf.post("/", headers={"Idempotency-Key": "order-1"})
    entry_point = {
        "mode": Lease(on_crash="hold"),
        "scope": lambda request: BuiltInScope("auth.user:7"),
    }
    with pytest.raises(KeyboardInterrupt):
        idempotent(**entry_point)(interrupted)(request)
    view = idempotent(**entry_point)(lambda request: HttpResponse("done"))
    assert view(request).status_code == 409
    (block,) = [
        block
        for language, block in FENCE.findall(text("admin.md"))
        if language == "console"
    ]
    get_user_model().objects.create_superuser("anna")
    for line in block.splitlines():
        call_command(*shlex.split(line.partition("manage.py ")[2]))
    assert view(request).content == b"done"


@pytest.mark.curl
@pytest.mark.drf
@pytest.mark.psycopg3
@pytest.mark.postgresql
@pytest.mark.slow
def test_the_quickstart_for_rest_framework_does_what_it_shows(tmp_path, db):
    with reader_with_postgresql(tmp_path) as someone:
        follow_the_quickstart(someone, "quickstart_drf.md")
        assert someone.databases == ["shop"]
