"""The relay's command, figures, checks, and that the pages on the outbox tell of all
there is.
"""

from __future__ import annotations

import json
import re
from inspect import Parameter, signature
from pathlib import Path

import pytest
from django.core.management import CommandError, load_command_class
from django.utils.module_loading import import_string

from django_idempotency.contrib.outbox import maintenance, signals
from django_idempotency.contrib.outbox.models import OutboxEvent, Relay
from tests.contrib.outbox.events import buffers_of, publish_all, told, waiting
from tests.support import checks
from tests.support.pages import code, rows, section
from tests.support.sql import run_sql


def test_the_relay_publishes_once_and_ends(outbox):
    publish_all("a")
    assert told("idempotency_outbox", "relay", "--once") == "default: 1 published"
    assert not Relay.objects.exists()


@pytest.mark.parametrize("arguments", [["--relays", "0"], ["--once", "--relays", "2"]])
def test_relays_are_counted_from_one_and_one_relay_publishes_once(outbox, arguments):
    with pytest.raises(CommandError, match="must be at least 1, and 1 with --once"):
        told("idempotency_outbox", "relay", *arguments)


def test_the_relay_needs_somewhere_to_publish_to(outbox):
    outbox(PUBLISHERS={})
    with pytest.raises(CommandError, match="has no PUBLISHERS"):
        told("idempotency_outbox", "relay", "--once")
    outbox()
    with pytest.raises(
        CommandError, match="PUBLISHERS has no 'defualt': did you mean 'default'"
    ):
        told("idempotency_outbox", "relay", "--once", "--publisher", "defualt")


LOCAL = "django_idempotency.contrib.outbox.publishers.local.LocalPublisher"


def only(backend, **options):
    return {"PUBLISHERS": {"default": {"BACKEND": backend, "OPTIONS": options}}}


@pytest.mark.parametrize(
    ("options", "id", "sentence"),
    [
        (
            {"BATCH": 0},
            "E001",
            (
                'IDEMPOTENCY["OUTBOX"]["BATCH"] is 0; it must be a number from 1 to'
                " 100000."
            ),
        ),
        (
            {"POLL": "1d"},
            "E001",
            """IDEMPOTENCY["OUTBOX"]["POLL"] is '1d'; it must be a number of seconds""",
        ),
        (
            {"ROUTES": {"a.*": "defualt"}},
            "E001",
            "OUTBOX: ROUTES sends 'a.*' to 'defualt', which is not in PUBLISHERS",
        ),
        ({"PUBLISHERS": {}}, "W002", "OUTBOX has no publisher called 'default'"),
        (
            only("nowhere.Publisher"),
            "E001",
            "can't be created: No module named 'nowhere'",
        ),
        (
            only("datetime.datetime", year=1),
            "E001",
            "datetime.datetime is not a Publisher",
        ),
        (
            only(LOCAL, function=print),
            "E001",
            "unexpected keyword argument 'function'. Its options: handler.",
        ),
        (
            only(LOCAL, handler="nowhere.at.all"),
            "E001",
            "can't be created: No module named 'nowhere'",
        ),
    ],
)
def test_a_check_says_what_is_wrong_with_an_option_or_a_publisher(
    outbox, options, id, sentence
):
    assert checks.found(label=checks.OUTBOX) == []
    outbox(**options)
    (message,) = checks.found(label=checks.OUTBOX)
    assert message.id == f"django_idempotency_outbox.{id}"
    assert sentence in message.msg


def test_a_wrong_setting_outside_outbox_is_left_to_e001(settings):
    settings.IDEMPOTENCY = {"LEESE": 1}
    assert checks.found(label=checks.OUTBOX) == []


def test_the_status_says_why_events_fail(outbox, relay):
    publish_all("a")
    outbox(FIRST_DELAY=60, LONGEST_DELAY=60)
    one = relay()
    one.publisher.refuses = lambda event: "it says no"
    one.step()
    one.lanes.leave()
    assert told("idempotency_outbox", "status").endswith(
        "1 failing, 0 dead, 0 live relays. The first failing event: it says no"
    )
    assert (
        json.loads(told("idempotency_outbox", "status", "--json"))["error"]
        == "it says no"
    )


@pytest.mark.postgresql
def test_figures_cost_the_same_however_many_events_wait(outbox, monkeypatch):
    monkeypatch.setattr(maintenance, "MOST", 500)
    buffers = []
    for count in (1_000, 30_000):
        waiting(count, "1 hour")
        waiting(count, "0", attempts=0)
        run_sql(f"ANALYZE {OutboxEvent._meta.db_table}")
        buffers.append(buffers_of(maintenance.figures))
    assert buffers[1] < buffers[0] + 1_000


APP = "django_idempotency.contrib.outbox"


def actions():
    parser = load_command_class(APP, "idempotency_outbox").create_parser(
        "manage.py", "idempotency_outbox"
    )
    (found,) = [action.choices for action in parser._actions if action.dest == "action"]
    return found


def test_every_option_of_the_relay_is_documented():
    documented = {
        code(option)[0] for option, _meaning in rows(section("outbox.md", "The relay"))
    }
    options = {
        name for action in actions()["relay"]._actions for name in action.option_strings
    }
    assert documented == options - {"-h", "--help", "-v", "--verbosity", "--database"}


def test_every_action_on_the_outbox_is_documented():
    documented = {
        code(action)[0]
        for action, _meaning in rows(section("outbox.md", "Dead letters"))
    }
    assert documented == set(actions()) - {"relay"}


def test_every_publisher_is_documented():
    classes = {code(name)[0] for name, *_ in rows(section("publishers.md", "Classes"))}
    wings = Path(signals.__file__).parents[1]
    there = {
        ".".join([*module.relative_to(wings).with_suffix("").parts, name]).replace(
            ".publisher.", "."
        )
        for module in wings.rglob("*.py")
        for name in re.findall(
            r"^class (\w+Publisher)\(", module.read_text(), re.MULTILINE
        )
    }
    assert classes == there


def test_every_option_of_a_publisher_is_documented_with_its_default():
    for name, options in rows(section("publishers.md", "Options of publishers")):
        cls = import_string(f"django_idempotency.contrib.{code(name)[0]}")
        documented = {
            option: default
            for option, _is, default in (each.partition("=") for each in code(options))
        }
        for parameter in signature(cls).parameters.values():
            if parameter.kind != Parameter.VAR_KEYWORD:
                assert parameter.name in documented, f"{name}: {parameter.name}"
            if default := documented.get(parameter.name):
                assert eval(default) == parameter.default, f"{name}: {parameter.name}"
