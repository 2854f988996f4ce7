"""A policy holds what its view states over what the project states, and no value that can't be meant."""

from __future__ import annotations

import copy
import math
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.policy import NAMES, Atomic, Body, Fingerprint, Keys, Lease, Limits, Policy
from django_idempotency.values.options import LONGEST


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("mode", "atomc", "did you mean 'atomic'?"),
        ("mode", "queue", "must be one of atomic, lease"),
        ("mode", None, 'must be "atomic", "lease" or an object'),
        ("wait", 0, "a number of seconds from 0.001 to"),
        ("wait", True, "a number of seconds from 0.001 to"),
        ("retention", None, "a number of seconds from 1 to"),
        ("retention", math.nan, "a number of seconds from 1 to"),
        ("retention", 10**12, "a number of seconds from 1 to"),
        ("audit_retention", timedelta(days=-1), "a number of seconds from 1 to"),
        ("required", "yes", "True or False"),
        ("scope", "tenant", 'None, "public" or a callable'),
        ("scope", "shop.scopes.tenant", 'None, "public" or a callable'),
        ("anonymous", "refused", "did you mean 'refuse'?"),
        ("using", ["default"], "the alias of a database"),
        ("keys", {"min_length": 5}, "a Keys(…)"),
        ("body", Keys(), "a Body(…)"),
        ("body", Body(redact="shop.cut"), "a Body(…), and its redact a callable"),
        ("fingerprint", {"only": ["amount"]}, "a callable or a Fingerprint(…)"),
        ("admit", 5, "a callable or Limits(…)"),
        ("methods", "POST", "a list, tuple or set of HTTP methods"),
        ("methods", ["post"], "in upper case"),
        ("release_statuses", 404, "HTTP statuses"),
        ("retry_statuses", [99], "HTTP statuses"),
        ("retry_statuses", [600], "HTTP statuses"),
    ],
)
def test_an_invalid_value_is_an_error_that_says_which(name, wrong, sentence):
    with pytest.raises(ImproperlyConfigured) as refused:
        Policy(**{name: wrong})
    assert str(refused.value).startswith(f"{name} is {wrong!r}; ")
    assert sentence in str(refused.value)


def test_options_that_are_stated_nowhere_have_their_documented_defaults():
    """Every one of these decides what happens to requests that name no policy at all."""
    policy = Policy()
    assert {name: getattr(policy, name) for name in NAMES} == {
        "required": False,
        "methods": {"POST", "PUT", "PATCH", "DELETE"},
        "mode": Atomic(claim="record", on_release="neutral", takeover_grace=0.5),
        "wait": None,
        "retention": 86_400,
        "audit_retention": None,
        "scope": None,
        "anonymous": None,
        "keys": Keys(pattern=None, min_length=1, strict=False, max_age=None),
        "fingerprint": Fingerprint(only=None, exclude=(), headers=()),
        "body": Body(limit=1_048_576, store=True, redact=None, encrypt=False, padding=0),
        "store_cookies": False,
        "may_replay": None,
        "admit": None,
        "release_statuses": {400, 401, 403, 404, 405, 406, 415, 422, 429},
        "retry_statuses": set(range(500, 600)),
        "fail_open": False,
        "store": "default",
        "using": None,
    }
    assert Policy(mode="lease").mode == Lease(seconds=60, on_crash="retry")


@pytest.mark.parametrize(
    "words",
    [
        {"mode": [Atomic(claim="lock"), Lease(on_crash="hold")]},
        {"scope": ["public", None, repr]},
        {"anonymous": ["refuse", "ignore", None]},
        {"fingerprint": [repr, Fingerprint(only=["amount"])]},
        {"admit": [repr, Limits(bytes=1), None]},
    ],
    ids=lambda words: next(iter(words)),
)
def test_each_documented_choice_of_an_option_is_accepted(words):
    for name, choices in words.items():
        assert [getattr(Policy(**{name: choice}), name) for choice in choices] == choices


def test_the_longest_time_is_a_century():
    assert LONGEST == 3_153_600_000


def test_the_bounds_of_an_option_are_accepted():
    policy = Policy(
        mode=Lease(seconds=1), retention=LONGEST, wait=0.001, body=Body(limit=0), release_statuses=[100, 599]
    )
    assert (policy.mode.seconds, policy.retention, policy.wait) == (1, LONGEST, 0.001)
    assert Atomic(takeover_grace=0).takeover_grace == 0


@pytest.mark.parametrize(
    ("policy", "atomic", "by_lock", "holds"),
    [
        (Policy(), True, False, False),
        (Policy(mode="lease"), False, False, False),
        (Policy(mode=Atomic(claim="lock")), True, True, False),
        (Policy(mode=Lease(on_crash="hold")), False, False, True),
    ],
)
def test_a_mode_has_the_defaults_of_its_word(policy, atomic, by_lock, holds):
    assert (policy.is_atomic, policy.claims_by_lock, policy.holds_on_crash) == (atomic, by_lock, holds)
    assert not policy.by_record.claims_by_lock
    assert policy.by_record.mode.on_release == policy.mode.on_release


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_option_can_be_stated_as_its_default(name):
    assert getattr(Policy(**{name: getattr(Policy(), name)}), name) == getattr(Policy(), name)


def test_precedence_of_view_project_and_defaults():
    project = Policy(retention=30, required=True, methods=["POST"])
    view = Policy(retention=5, required=False).over(project)
    assert (view.retention, view.required, view.methods, view.wait) == (5, False, {"POST"}, None)


def test_a_view_that_states_the_default_still_overrides_the_project():
    assert Policy(mode="atomic").over(Policy(mode="lease")).is_atomic


def test_a_group_leaves_what_it_does_not_set_to_the_project():
    view = Policy(body=Body(limit=5)).over(Policy(body=Body(encrypt=True, limit=9), keys=Keys(strict=True)))
    assert (view.body, view.keys) == (Body(limit=5, encrypt=True), Keys(strict=True))


def test_a_derived_policy_states_no_more_than_was_stated():
    derived = Policy(wait=5, mode="atomic").derive(required=True, retention=Policy().retention)
    in_force = derived.over(Policy(wait=30, mode="lease", retention=100, fail_open=True, required=False))
    assert (in_force.wait, in_force.is_atomic, in_force.required) == (5, True, True)
    assert in_force.retention == Policy().retention, "stated, though it is the default"
    assert in_force.fail_open, "not stated, so it is the settings'"


def test_nothing_wrong_can_be_derived():
    with pytest.raises(ImproperlyConfigured, match="retention is 0; it must be a number of seconds from 1 to"):
        Policy().derive(retention=0)
    with pytest.raises(TypeError, match=r"Unknown name 'retenion': did you mean 'retention'\?"):
        Policy().derive(retenion=5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_states_what_the_original_does(copied):
    in_force = copied(Policy(mode="atomic")).over(Policy(mode="lease", retention=7))
    assert (in_force.mode, in_force.retention) == (Atomic(), 7)


def test_an_audit_copy_is_kept_at_least_as_long_as_the_key():
    assert Policy(retention=100).kept_for == 100
    assert Policy(retention=100, audit_retention=500).kept_for == 500
    assert Policy(retention=100, audit_retention=5).kept_for == 100
