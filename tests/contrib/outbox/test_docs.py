"""The page on the outbox tells of all there is, as it is."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import Parameter, signature
from pathlib import Path

from django.core.management import load_command_class
from django.utils.module_loading import import_string

from django_idempotency.contrib.outbox import signals
from django_idempotency.contrib.outbox.conf import Options
from tests.support.pages import code, rows, section

APP = "django_idempotency.contrib.outbox"


def actions():
    parser = load_command_class(APP, "idempotency_outbox").create_parser("manage.py", "idempotency_outbox")
    (found,) = [action.choices for action in parser._actions if action.dest == "action"]
    return found


def test_every_option_is_documented_with_its_default():
    documented = {code(name)[0]: eval(code(default)[0]) for name, default, _ in rows(section("outbox.md", "Options"))}
    assert documented == {option.name.upper(): getattr(Options(), option.name) for option in fields(Options)}


def test_every_option_of_the_relay_is_documented():
    documented = {code(option)[0] for option, _meaning in rows(section("outbox.md", "The relay"))}
    options = {name for action in actions()["relay"]._actions for name in action.option_strings}
    assert documented == options - {"-h", "--help", "-v", "--verbosity", "--database"}


def test_every_action_on_the_outbox_is_documented():
    documented = {code(action)[0] for action, _meaning in rows(section("outbox.md", "Dead letters"))}
    assert documented == set(actions()) - {"relay"}


def test_every_publisher_is_documented():
    classes = {code(name)[0] for name, *_ in rows(section("publishers.md", "Classes"))}
    wings = Path(signals.__file__).parents[1]
    there = {
        ".".join([*module.relative_to(wings).with_suffix("").parts, name]).replace(".publisher.", ".")
        for module in wings.rglob("*.py")
        for name in re.findall(r"^class (\w+Publisher)\(", module.read_text(), re.MULTILINE)
    }
    assert classes == there


def test_every_option_of_a_publisher_is_documented_with_its_default():
    for name, options in rows(section("publishers.md", "Options of publishers")):
        cls = import_string(f"django_idempotency.contrib.{code(name)[0]}")
        documented = {option: default for option, _is, default in (each.partition("=") for each in code(options))}
        for parameter in signature(cls).parameters.values():
            if parameter.kind != Parameter.VAR_KEYWORD:
                assert parameter.name in documented, f"{name}: {parameter.name}"
            if default := documented.get(parameter.name):
                assert eval(default) == parameter.default, f"{name}: {parameter.name}"
