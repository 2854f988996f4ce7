"""A policy holds what its view states over what the project states, and no value that
can't be meant.
"""

from __future__ import annotations

import copy
import re

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_idempotency.values.policy import (
    Atomic,
    Body,
    Fingerprint,
    Key,
    Lease,
    Limits,
    Policy,
    retention_for,
)
from django_idempotency.values.rules import FOR_GOOD, LONGEST, rules


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("mode", "queue", 'must be "atomic", "lease", Atomic(…) or Lease(…)'),
        ("mode", None, 'must be "atomic", "lease", Atomic(…) or Lease(…)'),
        ("wait", 0, "a number of seconds from 0.001 to"),
        ("retention", LONGEST + 1, f"1 to {LONGEST}, or a timedelta, or None for good"),
        ("required", "yes", "True or False"),
        ("scope", "tenant", 'None, "public", or a callable'),
        ("scope", "shop.scopes.tenant", 'None, "public", or a callable'),
        ("anonymous", "refused", "must be one of refuse, ignore, or None"),
        ("using", ["default"], "the alias of a database"),
        ("key", {"min_length": 5}, "or a Key(…) with either as its source"),
        ("key", "shop.keys.of", "the name of a header, a callable"),
        ("key", Key(source="shop.keys.of"), "the name of a header, a callable"),
        ("body", Key(), "a Body(…)"),
        ("body", Body(redact="shop.cut"), "a Body(…), and its redact a callable"),
        ("fingerprint", {"only": ["amount"]}, "a Fingerprint(…), or a callable"),
        ("admit", 5, "a Limits(…), or None, or a callable"),
        ("methods", "POST", "a list, tuple or set of HTTP methods"),
        ("methods", ["post"], "in upper case"),
        ("release_statuses", 404, "statuses of errors"),
        ("release_statuses", [201], "statuses of errors, 400 to 599"),
        ("retry_statuses", [201], "statuses of errors, 400 to 599"),
        ("retry_statuses", [399], "statuses of errors"),
        ("retry_statuses", [600], "statuses of errors"),
    ],
)
def test_an_invalid_value_is_an_error_that_says_which(name, wrong, sentence):
    with pytest.raises(ImproperlyConfigured) as refused:
        Policy(**{name: wrong})
    assert str(refused.value).startswith(f"{name} is {wrong!r}; ")
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("mode", [Atomic(claim="lock"), Lease(on_crash="hold")]),
        ("scope", ["public", None, repr]),
        ("key", [Key(source="X-Key", min_length=5)]),
        ("anonymous", ["refuse", "ignore", None]),
        ("fingerprint", [repr, Fingerprint(only=["amount"])]),
        ("admit", [repr, Limits(bytes=1), None]),
    ],
)
def test_each_documented_choice_of_an_option_is_accepted(name, choices):
    assert [getattr(Policy(**{name: choice}), name) for choice in choices] == choices


@pytest.mark.parametrize(
    ("group", "idle", "sentence"),
    [
        (Fingerprint, {"only": ["a"], "exclude": ["a"]}, "exclude has 'a'"),
        (Fingerprint, {"only": ["a.b"], "exclude": ["a"]}, "exclude has 'a'"),
        (Fingerprint, {"only": ["a"], "exclude": ["ab.c"]}, "exclude has 'ab.c'"),
        (Body, {"store": False, "limit": 5}, "limit has no effect without store"),
        (Policy, {"scope": "public", "anonymous": "ignore"}, "anonymous has no effect"),
        (Policy, {"methods": (), "required": True}, "required has no effect without"),
        (Policy, {"retention": 9, "audit_retention": 8}, "audit_retention has no"),
    ],
)
def test_options_without_effect_together_are_refused(group, idle, sentence):
    with pytest.raises(ImproperlyConfigured, match=sentence):
        group(**idle)
    first, *rest = idle
    assert group(**{first: idle[first]}).over(
        group(**{name: idle[name] for name in rest})
    )


def test_the_bounds_of_an_option_are_accepted():
    policy = Policy(
        mode=Lease(seconds=1),
        retention=LONGEST,
        wait=0.001,
        body=Body(limit=0),
        release_statuses=[400, 599],
    )
    assert (policy.mode.seconds, policy.retention, policy.wait) == (1, LONGEST, 0.001)
    assert Atomic(takeover_grace=0).takeover_grace == 0
    for_good = Policy(retention=None).derive(wait=1)
    assert for_good.retention == for_good.kept_for == FOR_GOOD


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
    assert (policy.is_atomic, policy.claims_by_lock, policy.holds_on_crash) == (
        atomic,
        by_lock,
        holds,
    )
    assert not policy.by_record.claims_by_lock
    assert policy.by_record.mode.on_release == policy.mode.on_release


@pytest.mark.parametrize("name", sorted(rules(Policy)))
def test_every_option_can_be_stated_as_its_default(name):
    assert getattr(Policy(**{name: getattr(Policy(), name)}), name) == getattr(
        Policy(), name
    )


def test_precedence_of_view_project_and_defaults():
    project = Policy(retention=30, required=True, methods=["POST"])
    view = Policy(retention=5, required=False).over(project)
    assert (view.retention, view.required, view.methods, view.wait) == (
        5,
        False,
        {"POST"},
        None,
    )


def test_a_group_leaves_what_it_does_not_set_to_the_project():
    view = Policy(body=Body(limit=5)).over(
        Policy(body=Body(encrypt=True, limit=9), key=Key(strict=True))
    )
    assert (view.body, view.key) == (Body(limit=5, encrypt=True), Key(strict=True))


def test_the_name_of_a_header_is_merged_with_the_rules_of_the_project():
    project = Policy(key=Key(source="X-Theirs", min_length=5))
    assert Policy(key="X-Own").over(project).key == Key(source="X-Own", min_length=5)
    assert Policy(key=Key(strict=True)).over(project).key.source == "X-Theirs"


def test_a_derived_policy_states_only_what_was_stated():
    derived = Policy(wait=5, mode="atomic").derive(
        required=True, retention=Policy().retention
    )
    in_force = derived.over(
        Policy(wait=30, mode="lease", retention=100, fail_open=True, required=False)
    )
    assert (in_force.wait, in_force.is_atomic, in_force.required) == (5, True, True)
    assert in_force.retention == Policy().retention, "stated, though it is the default"
    assert in_force.fail_open, "not stated, so it is the settings'"


def test_nothing_wrong_can_be_derived():
    with pytest.raises(
        ImproperlyConfigured,
        match="retention is 0; it must be a number of seconds from 1 to",
    ):
        Policy().derive(retention=0)
    with pytest.raises(
        TypeError, match=r"Unknown name 'retenion': did you mean 'retention'\?"
    ):
        Policy().derive(retenion=5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_states_what_the_original_does(copied):
    in_force = copied(Policy(mode="atomic")).over(Policy(mode="lease", retention=7))
    assert (in_force.mode, in_force.retention) == (Atomic(), 7)


def test_an_audit_copy_is_kept_at_least_as_long_as_the_key():
    assert Policy(retention=100).kept_for == 100
    assert Policy(retention=100, audit_retention=500).kept_for == 500
    assert Policy(retention=100).over(Policy(audit_retention=5)).kept_for == 100


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ({"attempts": 1, "base": 5, "timeout": 30}, 30),
        ({"attempts": 3, "base": 1}, 1 + 2),
        (
            {"attempts": 5, "base": 1, "factor": 3, "cap": 10, "timeout": 2},
            5 * 2 + 1 + 3 + 9 + 10,
        ),
        ({"attempts": 4, "base": 60, "factor": 1}, 180),
        # no overflow on the way
        (
            {"attempts": 10_000, "base": 1, "cap": 60},
            1 + 2 + 4 + 8 + 16 + 32 + 60 * 9993,
        ),
    ],
)
def test_the_window_outlasts_a_clients_retries(schedule, seconds):
    assert retention_for(**schedule, margin=0) == seconds
    assert retention_for(**schedule, margin=300) == seconds + 300
    assert Policy(retention=retention_for(**schedule))


@pytest.mark.parametrize(
    "wrong",
    [{"attempts": 0}, {"base": -1}, {"timeout": -1}, {"cap": -1}, {"margin": -1}],
)
def test_a_schedule_that_can_not_be_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1, and no time may be negative"):
        retention_for(**{"attempts": 3, "base": 1} | wrong)


def test_a_schedule_gets_a_minute_s_margin_unless_it_is_stated():
    assert retention_for(attempts=1, base=1) == 60


def test_options_are_keywords_and_the_error_shows_how():
    with pytest.raises(TypeError, match=r"only, such as Lease\(seconds=30\)"):
        Lease(30)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("on_crash", "mode=Lease(on_crash=…)"),
        ("limit", "body=Body(limit=…)"),
        ("min_length", "key=Key(min_length=…)"),
    ],
)
def test_an_option_of_a_group_is_refused_with_the_group(name, written):
    with pytest.raises(TypeError, match=re.escape(f"write {written}.")):
        Policy(**{name: 1})
