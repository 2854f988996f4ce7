"""The page on the outbox tells of all there is, as it is."""

from __future__ import annotations

import re
from pathlib import Path

from django.core.management import BaseCommand, load_command_class
from django.dispatch import Signal

from django_idempotency.outbox import signals
from django_idempotency.outbox.conf import NAMES, Options
from tests.unit.test_docs import code, rows, section

APP = "django_idempotency.outbox"


def options_of(command):
    parser = load_command_class(APP, command).create_parser("manage.py", command)
    shared = {
        name for action in BaseCommand().create_parser("manage.py", "it")._actions for name in action.option_strings
    }
    return {name for action in parser._actions for name in action.option_strings} - shared - {"--database", "--json"}


def test_every_option_is_documented_with_its_default():
    documented = {code(name)[0]: eval(code(default)[0]) for name, default, _ in rows(section("outbox.md", "Options"))}
    assert documented == {name: getattr(Options(), name.lower()) for name in NAMES}


def test_every_option_of_the_relay_is_documented():
    documented = {code(option)[0] for option, _meaning in rows(section("outbox.md", "The relay"))}
    assert documented == options_of("idempotency_relay")


def test_every_action_on_the_outbox_is_documented():
    parser = load_command_class(APP, "idempotency_outbox").create_parser("manage.py", "idempotency_outbox")
    (actions,) = [action.choices for action in parser._actions if action.dest == "action"]
    documented = {code(action)[0] for action, _meaning in rows(section("outbox.md", "Dead letters"))}
    assert documented == set(actions)


def test_every_signal_is_documented_with_what_it_carries():
    source = Path(signals.__file__).read_text()
    documented = {code(name)[0]: code(carries) for name, _when, carries in rows(section("outbox.md", "Signals"))}
    assert documented.keys() == {name for name, value in vars(signals).items() if isinstance(value, Signal)}
    for name, carries in documented.items():
        comment = re.search(rf"^{name} = Signal\(\)(.*)$", source, re.MULTILINE)[1]
        assert all(argument in comment for argument in carries), name


def test_every_publisher_is_documented():
    classes = {code(name)[0] for name, *_ in rows(section("outbox.md", "Publishers"))}
    modules = (Path(signals.__file__).parent / "publishers").glob("*.py")
    there = {
        f"{module.stem}.{name}"
        for module in modules
        for name in re.findall(r"^class (\w+Publisher)\(", module.read_text(), re.MULTILINE)
    }
    assert classes == there
