"""Options are declared once, and wrong values and names are told with what is right."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import Conf
from django_idempotency.options import listed, nearest, number, option, or_none, unknown_names, validate
from django_idempotency.policy import NAMES, Policy


@pytest.mark.parametrize("options", [Policy, Conf])
def test_every_option_has_a_rule(options):
    assert [field.name for field in fields(options) if "rule" not in field.metadata] in ([], ["policy"])


@dataclass(frozen=True)
class Options:
    pause: float | None = option(1, or_none(number(0, 9)))
    size: float = option(1, number(1, math.inf))
    words: tuple[str, ...] = option((), listed("words", str.isalpha, lambda index, _word: f"word {index} is none."))
    password: str | None = option(None, or_none(number(0, 9)), secret=True)

    def __post_init__(self) -> None:
        validate(self)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"pause": 10}, "pause is 10; it must be a number from 0 to 9, or None."),
        ({"size": "1MB"}, "size is '1MB'; it must be a number of at least 1."),
        ({"words": "a"}, "words is 'a'; it must be a list of words."),
        ({"words": ["a", "1"]}, "words is ['a', '1']; word 1 is none."),
        ({"password": "hunter2"}, "password: it must be a number from 0 to 9, or None."),
    ],
)
def test_a_wrong_value_is_told_with_what_it_must_be(wrong, sentence):
    with pytest.raises(ImproperlyConfigured) as refused:
        Options(**wrong)
    assert str(refused.value) == sentence


def test_what_is_secret_is_not_shown():
    assert repr(Options(password=7)) == "Options(pause=1, size=1, words=())"


def test_a_wrong_name_is_told_the_nearest_right_one_in_whatever_case():
    assert nearest("leese", ["LEASE", "WAIT"]) == "did you mean 'LEASE'?"
    assert nearest("mod_x_y", NAMES) == "did you mean 'mode'?"
    assert nearest("xyz", ["b", "a"]) == "it must be one of a, b."
    assert nearest("xyz", ["default"]) == "it must be 'default'."
    assert unknown_names({"retension": 1, "wait": 2}, ["wait", "retention"]) == [
        "Unknown name 'retension': did you mean 'retention'?"
    ]
