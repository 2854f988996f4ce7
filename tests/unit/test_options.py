"""Options are declared once, and wrong values and names are told with what is right."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import Conf
from django_idempotency.contrib.cached import CacheOptions
from django_idempotency.contrib.dashboard.conf import DashboardOptions
from django_idempotency.contrib.outbox.conf import OutboxOptions
from django_idempotency.contrib.redis.client import RedisOptions
from django_idempotency.values.policy import (
    Atomic,
    Body,
    Fingerprint,
    Key,
    Lease,
    Limits,
    Policy,
)
from django_idempotency.values.rules import (
    LONGEST,
    conform,
    listed,
    nearest,
    number,
    option,
    or_none,
    rules,
    seconds,
    unknown_names,
    validate,
)

GROUPS = [Atomic, Lease, Key, Fingerprint, Body, Limits]
OF_WINGS = [DashboardOptions, OutboxOptions, CacheOptions, RedisOptions]


@pytest.mark.parametrize("options", [Policy, Conf, *OF_WINGS, *GROUPS])
def test_every_option_has_a_rule(options):
    assert [
        field.name for field in fields(options) if "rule" not in field.metadata
    ] in ([], ["policy", "of_apps"])


@dataclass(frozen=True)
class Options:
    pause: float | None = option(1, or_none(number(0, 9)))
    size: float = option(1, number(1, math.inf))
    words: tuple[str, ...] = option((), listed("words", str.isalpha))
    password: str | None = option(None, or_none(number(0, 9)), secret=True)

    def __post_init__(self) -> None:
        validate(self)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"pause": 10}, "pause is 10; it must be a number from 0 to 9, or None."),
        ({"size": "1MB"}, "size is '1MB'; it must be a number of at least 1."),
        ({"words": "a"}, "words is 'a'; it must be a list of words."),
        ({"words": ["a", "1"]}, "words is ['a', '1']; it must be a list of words."),
        (
            {"password": "hunter2"},
            "password: it must be a number from 0 to 9, or None.",
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_says_what_it_must_be(wrong, sentence):
    with pytest.raises(ImproperlyConfigured) as refused:
        Options(**wrong)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("options", [Conf, Policy, *OF_WINGS, *GROUPS])
def test_a_misspelt_option_is_an_error_with_the_nearest_right_one(options):
    name = next(iter(rules(options)))
    with pytest.raises(TypeError, match=f"'{name}s': did you mean '{name}'"):
        options(**{f"{name}s": 1})


def test_a_secret_option_is_not_shown():
    assert repr(Options(password=7)) == "Options(pause=1, size=1, words=())"


def test_a_wrong_name_is_an_error_with_the_nearest_right_one_in_any_case():
    assert nearest("leese", ["LEASE", "WAIT"]) == "did you mean 'LEASE'?"
    assert nearest("mod_x_y", rules(Policy)) == "did you mean 'mode'?"
    assert nearest("xyz", ["b", "a"]) == "it must be one of a, b."
    assert nearest("xyz", ["default"]) == "it must be 'default'."
    assert unknown_names({"retension": 1, "wait": 2}, ["wait", "retention"]) == [
        "Unknown name 'retension': did you mean 'retention'?"
    ]


@pytest.mark.parametrize(
    ("stated", "kept"),
    [
        (1, 1),
        (1.5, 1.5),
        (timedelta(minutes=2), 120.0),
        (timedelta(milliseconds=1500), 1.5),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_a_timedelta(stated, kept):
    assert conform("pause", stated, seconds(1)) == kept
    assert isinstance(conform("pause", stated, seconds(1)), int | float)


@pytest.mark.parametrize(
    "wrong",
    [
        0,
        "60",
        True,
        None,
        math.nan,
        math.inf,
        timedelta(),
        timedelta(days=-1),
        timedelta(seconds=LONGEST + 1),
    ],
)
def test_a_value_that_is_not_a_duration_is_refused(wrong):
    with pytest.raises(
        ImproperlyConfigured,
        match=r"it must be a number of seconds from 1 to .*, or a timedelta",
    ):
        conform("pause", wrong, seconds(1))


@pytest.mark.parametrize(
    "kept",
    [
        lambda day: Policy(retention=day).retention,
        lambda day: Policy(audit_retention=day).audit_retention,
        lambda day: Policy(wait=day).wait,
        lambda day: Lease(seconds=day).seconds,
        lambda day: Atomic(takeover_grace=day).takeover_grace,
        lambda day: Conf(sweep_pause=day).sweep_pause,
        lambda day: DashboardOptions(observe=day).observe,
        lambda day: OutboxOptions(poll=day).poll,
    ],
)
def test_a_timedelta_goes_wherever_a_duration_goes(kept):
    assert kept(timedelta(days=1)) == 86_400
    assert isinstance(kept(timedelta(days=1)), float)


@pytest.mark.parametrize(
    ("group", "wrong", "sentence"),
    [
        (
            Atomic,
            {"claim": "locks"},
            "Atomic.claim is 'locks'; it must be one of record, lock.",
        ),
        (
            Lease,
            {"seconds": 0},
            "Lease.seconds is 0; it must be a number of seconds from 1 to",
        ),
        (
            Key,
            {"pattern": "("},
            "Key.pattern is '('; it must be a regular expression, or None.",
        ),
        (
            Key,
            {"min_length": 256},
            "Key.min_length is 256; it must be a number from 1 to 255.",
        ),
        (
            Fingerprint,
            {"only": "amount"},
            "Fingerprint.only is 'amount'; it must be a list, tuple or set of names",
        ),
        (
            Body,
            {"encrypt": "required"},
            "Body.encrypt is 'required'; it must be True, False or \"require\".",
        ),
        (
            Body,
            {"redact": "cut"},
            (
                "Body.redact is 'cut'; it must be a callable, or in the settings its"
                " dotted path"
            ),
        ),
        (
            Limits,
            {"new_keys": 0},
            "Limits.new_keys is 0; it must be a number from 1 to 1000000000, or None.",
        ),
    ],
)
def test_a_wrong_value_in_a_group_names_itself_and_what_it_must_be(
    group, wrong, sentence
):
    with pytest.raises(ImproperlyConfigured) as refused:
        group(**wrong)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize("group", [Policy, *GROUPS])
def test_a_wrong_name_in_a_group_is_an_error_that_names_the_group(group):
    with pytest.raises(
        TypeError, match=rf"{group.__name__}: Unknown name 'nothing_like_it': "
    ):
        group(nothing_like_it=1)


def test_options_without_effect_in_a_group_are_refused():
    with pytest.raises(
        ImproperlyConfigured,
        match=r"Limits\(\) limits nothing; set new_keys, bytes or both\.",
    ):
        Limits()
    assert Fingerprint() == Fingerprint(only=None)


@pytest.mark.parametrize("group", GROUPS[:-1])
def test_a_group_is_equal_to_another_with_the_same_options(group):
    assert (group(), hash(group())) == (group(), hash(group()))
