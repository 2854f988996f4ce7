"""A policy holds what its view states over what the project states, and no value that can't be meant."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.options import LONGEST
from django_idempotency.policy import NAMES, Policy


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("mode", "atomc", "did you mean 'atomic'?"),
        ("mode", "LEASE", "did you mean 'lease'?"),
        ("mode", None, "must be one of atomic, lease"),
        ("on_crash", "retries", "did you mean 'retry'?"),
        ("on_conflict", "queue", "must be one of reject, wait"),
        ("lock", "skip-locked", "did you mean 'skip_locked'?"),
        ("lease", 0, "a number of seconds from 1 to"),
        ("lease", "60", "a number of seconds from 1 to"),
        ("lease", True, "a number of seconds from 1 to"),
        ("lease", None, "a number of seconds from 1 to"),
        ("lease", math.nan, "a number of seconds from 1 to"),
        ("retention", math.inf, "a number of seconds from 1 to"),
        ("retention", 10**12, "a number of seconds from 1 to"),
        ("audit_retention", -1, "a number of seconds from 1 to"),
        ("wait_timeout", -1, "a number of seconds from 0 to"),
        ("takeover_grace", "1s", "a number of seconds from 0 to"),
        ("max_body_size", -1, "a number of at least 0"),
        ("required", "yes", "True or False"),
        ("strict_header", None, "True or False"),
        ("store_cookies", 1, "True or False"),
        ("fail_open", "False", "True or False"),
        ("scope", "tenant", 'None, "public" or a callable'),
        ("scope", 7, 'None, "public" or a callable'),
        ("scope", "shop.scopes.tenant", 'None, "public" or a callable'),
        ("anonymous", "refused", "did you mean 'refuse'?"),
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
        "takeover_grace": 0.5,
        "on_crash": "retry",
        "on_conflict": "reject",
        "wait_timeout": 10,
        "retention": 86_400,
        "audit_retention": None,
        "max_request_age": None,
        "scope": None,
        "anonymous": None,
        "strict_header": False,
        "lock": "nowait",
        "max_body_size": 1_048_576,
        "store_body": True,
        "store_cookies": False,
        "cacheable_replays": False,
        "key_pattern": None,
        "min_key_length": 1,
        "max_waiters": 4,
        "admit": None,
        "max_new_keys": None,
        "max_stored_bytes": None,
        "may_replay": None,
        "fingerprint_headers": set(),
        "redact": None,
        "encrypt": False,
        "encrypt_padding": 0,
        "fail_open": False,
        "store": "default",
        "using": None,
        "fingerprint": None,
        "fingerprint_fields": None,
        "fingerprint_exclude": set(),
        "claim": "record",
        "on_release": "neutral",
        "release_statuses": {400, 401, 403, 404, 405, 406, 415, 422, 429},
        "retry_statuses": set(range(500, 600)),
    }


@pytest.mark.parametrize(
    "words",
    [
        {"mode": ["atomic", "lease"]},
        {"on_crash": ["retry", "hold"]},
        {"claim": ["record", "lock"]},
        {"on_conflict": ["reject", "wait"]},
        {"lock": ["nowait", "skip_locked"]},
        {"scope": ["public", None, repr]},
        {"anonymous": ["refuse", "ignore", None]},
    ],
    ids=lambda words: next(iter(words)),
)
def test_each_of_its_words_can_be_meant(words):
    for name, choices in words.items():
        assert [getattr(Policy(**{name: choice}), name) for choice in choices] == choices


def test_the_longest_time_is_a_century():
    assert LONGEST == 3_153_600_000


def test_the_bounds_themselves_can_be_meant():
    policy = Policy(
        lease=1, retention=LONGEST, wait_timeout=0, takeover_grace=0, max_body_size=0, release_statuses=[100, 599]
    )
    assert (policy.lease, policy.retention, policy.wait_timeout) == (1, LONGEST, 0)


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


def test_precedence_of_view_project_and_defaults():
    project = Policy(lease=30, required=True, methods=["POST"])
    view = Policy(lease=5, required=False).over(project)
    assert (view.lease, view.required, view.methods, view.wait_timeout) == (5, False, {"POST"}, Policy().wait_timeout)


def test_a_view_that_states_the_default_still_overrides_the_project():
    assert Policy(mode="atomic").over(Policy(mode="lease")).mode == "atomic"


@pytest.mark.parametrize("change", [Policy.derive, dataclasses.replace], ids=["derive", "replace"])
def test_what_is_derived_states_no_more_than_is_stated(change):
    derived = change(Policy(lease=5, mode="atomic"), required=True, retention=Policy().retention)
    project = Policy(lease=30, mode="lease", retention=100, wait_timeout=1, required=False)
    in_force = derived.over(project)
    assert (in_force.lease, in_force.mode, in_force.required) == (5, "atomic", True)
    assert in_force.retention == Policy().retention, "stated, though it is the default"
    assert in_force.wait_timeout == 1, "not stated, so it is the settings'"


@pytest.mark.parametrize("change", [Policy.derive, dataclasses.replace], ids=["derive", "replace"])
def test_deriving_twice_keeps_all_stated_options(change):
    derived = change(change(Policy(lease=5), required=True), lease=6)
    in_force = derived.over(Policy(lease=30, retention=100))
    assert (in_force.lease, in_force.required, in_force.retention) == (6, True, 100)


def test_nothing_wrong_can_be_derived():
    with pytest.raises(ImproperlyConfigured, match="lease is 0; it must be a number of seconds from 1 to"):
        Policy().derive(lease=0)
    with pytest.raises(TypeError, match=r"Unknown name 'leese': did you mean 'lease'\?"):
        Policy().derive(leese=5)


@pytest.mark.parametrize(
    ("wrong", "right"), [("requird", "required"), ("REQUIRED", "required"), ("reteniton", "retention")]
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(wrong, right):
    with pytest.raises(TypeError, match=rf"Unknown name '{wrong}': did you mean '{right}'\?"):
        Policy(**{wrong: 1})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_states_what_the_original_does(copied):
    in_force = copied(Policy(mode="atomic")).over(Policy(mode="lease", lease=7))
    assert (in_force.mode, in_force.lease) == ("atomic", 7)


def test_an_audit_copy_is_kept_at_least_as_long_as_the_key():
    assert Policy(retention=100).kept_for == 100
    assert Policy(retention=100, audit_retention=500).kept_for == 500
    assert Policy(retention=100, audit_retention=5).kept_for == 100
