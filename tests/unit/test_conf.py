"""The IDEMPOTENCY setting: read live, and wrong in no silence."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import override_settings

from django_idempotency.conf import GLOBAL_NAMES, NAMES, conf, resolve
from django_idempotency.values.policy import Atomic, Body, Lease, Policy


def test_unknown_settings_are_named_with_suggestions(settings):
    settings.IDEMPOTENCY = {"LEESE": 1, "MAX_BODY": 1, "QQQ": 2}
    with pytest.raises(ImproperlyConfigured) as refused:
        conf()
    assert "IDEMPOTENCY: Unknown name 'LEESE': did you mean 'LEASE'?" in str(
        refused.value
    )
    assert "'MAX_BODY': did you mean 'BODY'?" in str(refused.value)
    assert f"'QQQ': it must be one of {', '.join(sorted(NAMES))}." in str(refused.value)


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        (
            {"RETENTION": "60"},
            (
                r'IDEMPOTENCY\["RETENTION"\] is \'60\'; it must be a number of seconds'
                r" from 1 to"
            ),
        ),
        ({"LEASE": 60}, r'IDEMPOTENCY\["LEASE"\] is 60; it must be a Lease\(…\)'),
        ({"ATOMIC": Lease()}, r"it must be an Atomic\(…\)"),
        ({"BODY": {"encrypt": True}}, r"it must be a Body\(…\)"),
        (
            {"DECISIONS": ["notes"]},
            "it must be a list of names from note, second_operator",
        ),
        ({"MAX_WAITERS": -1}, "it must be a number from 0 to 1000000"),
        ({"ENABLED": 1}, "it must be True or False"),
        ({"SCOPE": "tenant"}, 'None, "public", or a callable'),
        (
            {"KEY": "HTTP_IDEMPOTENCY_KEY"},
            r"it must be the name of a header, a callable, or a Key\(…\)",
        ),
        (
            {"INSTRUMENTATION": "prometheus"},
            "it must be a list of names from prometheus, opentelemetry",
        ),
        (
            {"EXEMPT_PATHS": "/api/"},
            "is '/api/'; it must be a list of regular expressions",
        ),
        ({"EXEMPT_PATHS": ["^/api/", "("]}, "it must be a list of regular expressions"),
        ({"PROBLEM_TYPE_BASE_URL": 1}, r"PROBLEM_TYPE_BASE_URL\"\] is 1"),
        (None, "it must be a dict"),
    ],
)
def test_a_bad_value_is_an_error_that_says_which(settings, stated, sentence):
    settings.IDEMPOTENCY = stated
    with pytest.raises(ImproperlyConfigured, match=sentence):
        conf()


def test_texts_of_the_settings_hide_what_stores_and_publishers_know(settings):
    secret = {"OPTIONS": {"url": "redis://:secret@host"}, "BACKEND": "shop.Store"}
    settings.IDEMPOTENCY = {
        "STORES": {"redis": secret},
        "OUTBOX": {"PUBLISHERS": {"default": secret}},
    }
    assert "secret" not in repr(conf())


def test_without_the_setting_there_are_the_defaults(settings):
    # of a deletion alone nobody is told
    settings.IDEMPOTENCY = {"LEASE": Lease(seconds=7)}
    del settings.IDEMPOTENCY
    assert conf().policy.key.meta_name == "HTTP_IDEMPOTENCY_KEY"
    assert (conf().policy.mode, conf().lease, conf().policy.fail_open) == (
        Atomic(),
        Lease(seconds=60),
        False,
    )


def test_settings_are_read_live():
    policy = Policy(required=True, mode="lease")
    with override_settings(
        IDEMPOTENCY={"LEASE": Lease(seconds=7), "KEY": "X-Request-Once"}
    ):
        assert (resolve(policy).mode.seconds, resolve(policy).key.meta_name) == (
            7,
            "HTTP_X_REQUEST_ONCE",
        )
        with override_settings(IDEMPOTENCY={"LEASE": Lease(seconds=8)}):
            assert (resolve(policy).mode.seconds, resolve(policy).key.meta_name) == (
                8,
                "HTTP_IDEMPOTENCY_KEY",
            )
        assert resolve(policy).mode.seconds == 7
    assert resolve(policy).required is True


def test_a_view_follows_the_settings_of_the_moment(call, settings):
    def view(request):
        return HttpResponse(request.idempotency.key or "unkeyed")

    assert call(view, key="one").content == b"one"
    settings.IDEMPOTENCY = {"KEY": "X-Once"}
    assert call(view, key="two").content == b"unkeyed"
    assert call(view, key=None, headers={"X-Once": "three"}).content == b"three"
    settings.IDEMPOTENCY = {"METHODS": ["PATCH"]}
    assert call(view, key="four").content == b"unkeyed"
    assert call(view, key="four", method="PATCH").content == b"four"


def tenant(request):
    return "tenant:7"


def cut(response):
    return response


@pytest.mark.parametrize("name", ["SCOPE", "ADMIT", "FINGERPRINT"])
def test_a_callable_may_be_given_as_its_dotted_path(settings, name):
    settings.IDEMPOTENCY = {name: f"{__name__}.tenant"}
    assert getattr(conf().policy, name.lower()) is tenant


@pytest.mark.parametrize("path", ["shop.nowhere", f"{__name__}.nothing"])
def test_a_dotted_path_that_leads_nowhere_is_an_error_that_says_which(settings, path):
    settings.IDEMPOTENCY = {"BODY": Body(redact=path)}
    with pytest.raises(
        ImproperlyConfigured,
        match=rf'IDEMPOTENCY\["BODY"\].redact is \'{path}\', which can\'t be imported',
    ):
        conf()


def test_a_dotted_path_must_lead_to_a_callable(settings):
    settings.IDEMPOTENCY = {"BODY": Body(redact=f"{__name__}.__doc__")}
    with pytest.raises(ImproperlyConfigured, match="its redact a callable"):
        conf()


def test_a_callable_inside_a_group_may_be_given_as_its_dotted_path(settings):
    settings.IDEMPOTENCY = {"BODY": Body(redact=f"{__name__}.cut", limit=5)}
    assert conf().policy.body == Body(redact=cut, limit=5)


@pytest.mark.parametrize("word", ["atomic", "lease"])
@pytest.mark.parametrize("by_setting", [False, True])
def test_a_word_means_what_the_settings_say(settings, word, by_setting):
    settings.IDEMPOTENCY = {"ATOMIC": Atomic(claim="lock"), "LEASE": Lease(seconds=20)}
    settings.IDEMPOTENCY |= {"MODE": word} if by_setting else {}
    meant = {"atomic": Atomic(claim="lock"), "lease": Lease(seconds=20)}[word]
    assert resolve(Policy() if by_setting else Policy(mode=word)).mode == meant
    assert conf().policy.mode == (meant if by_setting else Atomic(claim="lock"))


def test_a_mode_as_an_object_goes_over_what_its_word_means(settings):
    settings.IDEMPOTENCY = {
        "MODE": Lease(seconds=5),
        "ATOMIC": Atomic(claim="lock"),
        "LEASE": Lease(seconds=20),
    }
    assert resolve(Policy()).mode == Lease(seconds=5)
    assert resolve(Policy(mode=Atomic(takeover_grace=2))).mode == Atomic(
        claim="lock", takeover_grace=2
    )
    assert resolve(Policy(mode="lease")).mode == Lease(seconds=20)


def test_the_settings_are_few():
    assert len(GLOBAL_NAMES) <= 25
