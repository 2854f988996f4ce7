"""A policy holds what its view states over what the project states, and no value that can't be meant."""

from __future__ import annotations

import math

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.policy import LONGEST, NAMES, Policy, nearest, unknown_names


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("mode", "atomc", "did you mean 'atomic'?"),
        ("mode", "LEASE", "did you mean 'lease'?"),
        ("mode", None, "must be one of atomic, lease"),
        ("on_crash", "retries", "did you mean 'retry'?"),
        ("in_flight", "queue", "must be one of reject, wait"),
        ("lock", "skip-locked", "did you mean 'skip_locked'?"),
        ("lease", 0, "a number from 1 to"),
        ("lease", "60", "a number from 1 to"),
        ("lease", True, "a number from 1 to"),
        ("lease", None, "a number from 1 to"),
        ("lease", math.nan, "a number from 1 to"),
        ("retention", math.inf, "a number from 1 to"),
        ("retention", 10**12, "a number from 1 to"),
        ("audit", -1, "a number from 1 to"),
        ("wait", -1, "a number from 0 to"),
        ("grace", "1s", "a number from 0 to"),
        ("max_body", -1, "a number from 0 to"),
        ("required", "yes", "True or False"),
        ("strict", None, "True or False"),
        ("store_cookies", 1, "True or False"),
        ("fail_open", "False", "True or False"),
        ("scope", "tenant", 'None, "public" or a callable'),
        ("scope", 7, 'None, "public" or a callable'),
        ("using", ["default"], "the alias of a database"),
        ("fingerprint", "body", "a callable"),
        ("methods", "POST", "a list, tuple or set of HTTP methods"),
        ("methods", ["post"], "in upper case"),
        ("methods", [7], "in upper case"),
        ("methods", None, "a list, tuple or set of HTTP methods"),
        ("fingerprint_fields", "amount", "a list, tuple or set of names"),
        ("fingerprint_exclude", [1], "a list, tuple or set of names"),
        ("fingerprint_exclude", None, "a list, tuple or set of names"),
        ("release_statuses", ["404"], "HTTP statuses"),
        ("release_statuses", 404, "HTTP statuses"),
        ("retry_statuses", [5], "HTTP statuses"),
    ],
)
def test_a_value_that_cannot_be_meant_is_an_error_that_says_which(name, wrong, sentence):
    with pytest.raises(ImproperlyConfigured) as refused:
        Policy(**{name: wrong})
    assert str(refused.value).startswith(f"{name} is {wrong!r}; ")
    assert sentence in str(refused.value)


def test_what_is_not_stated_anywhere_is_as_documented():
    """Every one of these decides what happens to requests that name no policy at all."""
    policy = Policy()
    assert {name: getattr(policy, name) for name in NAMES} == {
        "required": False,
        "methods": {"POST", "PUT", "PATCH", "DELETE"},
        "mode": "atomic",
        "lease": 60,
        "grace": 0.5,
        "on_crash": "retry",
        "in_flight": "reject",
        "wait": 10,
        "retention": 86_400,
        "audit": None,
        "late_after": None,
        "scope": None,
        "strict": False,
        "lock": "nowait",
        "max_body": 1_048_576,
        "store_body": True,
        "store_cookies": False,
        "redact": None,
        "encrypt": False,
        "fail_open": False,
        "using": None,
        "fingerprint": None,
        "fingerprint_fields": None,
        "fingerprint_exclude": set(),
        "release_statuses": {400, 401, 403, 404, 405, 406, 415, 422, 429},
        "retry_statuses": set(range(500, 600)),
    }


@pytest.mark.parametrize(
    "words",
    [
        {"mode": ["atomic", "lease"]},
        {"on_crash": ["retry", "hold"]},
        {"in_flight": ["reject", "wait"]},
        {"lock": ["nowait", "skip_locked"]},
        {"scope": ["public", None, repr]},
    ],
    ids=lambda words: next(iter(words)),
)
def test_each_of_its_words_can_be_meant(words):
    for name, choices in words.items():
        assert [getattr(Policy(**{name: choice}), name) for choice in choices] == choices


def test_the_longest_time_is_a_century():
    assert LONGEST == 3_153_600_000


def test_the_bounds_themselves_can_be_meant():
    policy = Policy(lease=1, retention=LONGEST, wait=0, grace=0, max_body=0, release_statuses=[100, 599])
    assert (policy.lease, policy.retention, policy.wait) == (1, LONGEST, 0)


@pytest.mark.parametrize("statuses", [[99], [600]])
def test_a_status_beyond_the_bounds_can_not(statuses):
    with pytest.raises(ImproperlyConfigured, match="HTTP statuses"):
        Policy(retry_statuses=statuses)


def test_a_name_that_is_no_option_is_an_error():
    with pytest.raises(TypeError, match="leese"):
        Policy(leese=5)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_option_can_be_stated_as_its_default(name):
    assert getattr(Policy(**{name: getattr(Policy(), name)}), name) == getattr(Policy(), name)


def test_what_a_view_states_comes_before_the_projects_and_that_before_the_defaults():
    project = Policy(lease=30, required=True, methods=["POST"])
    view = Policy(lease=5, required=False).over(project)
    assert (view.lease, view.required, view.methods, view.wait) == (5, False, {"POST"}, Policy().wait)


def test_a_view_that_states_the_default_still_overrides_the_project():
    assert Policy(mode="atomic").over(Policy(mode="lease")).mode == "atomic"


def test_an_audit_copy_is_kept_at_least_as_long_as_the_key():
    assert Policy(retention=100).kept_for == 100
    assert Policy(retention=100, audit=500).kept_for == 500
    assert Policy(retention=100, audit=5).kept_for == 100


def test_a_wrong_name_is_told_the_nearest_right_one_in_whatever_case():
    assert nearest("leese", ["LEASE", "WAIT"]) == "did you mean 'LEASE'?"
    assert nearest("mod_x_y", NAMES) == "did you mean 'mode'?"
    assert nearest("xyz", ["b", "a"]) == "it must be one of a, b."
    assert unknown_names({"retension": 1, "wait": 2}, ["wait", "retention"]) == [
        "Unknown name 'retension': did you mean 'retention'?"
    ]
