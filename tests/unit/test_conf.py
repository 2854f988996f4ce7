"""The IDEMPOTENCY setting: read live, and wrong in no silence."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import override_settings

from django_idempotency.conf import NAMES, conf, resolve
from django_idempotency.policy import Policy


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("LEESE", "LEASE"),
        ("lease", "LEASE"),
        ("RETENTION_SECONDS", "RETENTION"),
        ("HEADERS", "HEADER"),
        ("EXEMPT_PATH", "EXEMPT_PATHS"),
        ("FAILOPEN", "FAIL_OPEN"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(settings, wrong, right):
    settings.IDEMPOTENCY = {wrong: 1}
    with pytest.raises(ImproperlyConfigured, match=f"IDEMPOTENCY: Unknown name '{wrong}': did you mean '{right}'?"):
        conf()


def test_unknown_settings_are_named_with_suggestions(settings):
    settings.IDEMPOTENCY = {"LEESE": 1, "QQQ": 2}
    with pytest.raises(ImproperlyConfigured) as refused:
        conf()
    assert "'LEESE': did you mean 'LEASE'?" in str(refused.value)
    assert f"'QQQ': it must be one of {', '.join(sorted(NAMES))}." in str(refused.value)


@pytest.mark.parametrize(
    ("stated", "sentence"),
    [
        ({"LEASE": "60"}, r'IDEMPOTENCY\["LEASE"\] is \'60\'; it must be a number of seconds from 1 to'),
        ({"ENABLED": 1}, "it must be True or False"),
        ({"SCOPE": "tenant"}, 'None, "public" or a callable'),
        ({"MODE": "atomik"}, "did you mean 'atomic'"),
        ({"HEADER": ""}, r"HEADER\"\] is ''; it must be the name of a header"),
        ({"HEADER": "Idempotency Key"}, "the name of a header"),
        ({"HEADER": None}, "the name of a header"),
        ({"HEADER": "HTTP_IDEMPOTENCY_KEY"}, "it must be the name of a header, such as 'Idempotency-Key'"),
        ({"INSTRUMENTATION": "prometheus"}, "it must be a list of names from prometheus, opentelemetry"),
        ({"EXEMPT_PATHS": "/api/"}, "is '/api/'; it must be a list of regular expressions"),
        ({"EXEMPT_PATHS": [1]}, "1 is not a regular expression"),
        ({"EXEMPT_PATHS": None}, "it must be a list of regular expressions"),
        ({"EXEMPT_PATHS": ["^/api/", "("]}, r"'\(' is not a regular expression"),
        ({"PROBLEM_TYPE_BASE_URL": None}, r"PROBLEM_TYPE_BASE_URL\"\] is None"),
        (["MODE"], "it must be a dict"),
        (None, "it must be a dict"),
    ],
)
def test_a_bad_value_is_an_error_that_says_which(settings, stated, sentence):
    settings.IDEMPOTENCY = stated
    with pytest.raises(ImproperlyConfigured, match=sentence):
        conf()


def test_without_the_setting_there_are_the_defaults(settings):
    settings.IDEMPOTENCY = {"LEASE": 7}  # of a deletion alone nobody is told
    del settings.IDEMPOTENCY
    assert conf().header == "Idempotency-Key"
    assert (conf().policy.mode, conf().policy.lease, conf().policy.fail_open) == ("atomic", 60, False)


def test_settings_are_read_live():
    policy = Policy(required=True)
    with override_settings(IDEMPOTENCY={"LEASE": 7, "HEADER": "X-Request-Once"}):
        assert (resolve(policy).lease, conf().meta_name) == (7, "HTTP_X_REQUEST_ONCE")
        with override_settings(IDEMPOTENCY={"LEASE": 8}):
            assert (resolve(policy).lease, conf().meta_name) == (8, "HTTP_IDEMPOTENCY_KEY")
        assert resolve(policy).lease == 7
    assert resolve(policy).required is True


def test_what_a_view_does_follows_the_settings_of_the_moment(call, settings):
    def view(request):
        return HttpResponse(request.idempotency.key if getattr(request, "idempotency", None) else "unkeyed")

    assert call(view, key="one").content == b"one"
    settings.IDEMPOTENCY = {"HEADER": "X-Once"}
    assert call(view, key="two").content == b"unkeyed"
    assert call(view, key=None, headers={"X-Once": "three"}).content == b"three"
    settings.IDEMPOTENCY = {"METHODS": ["PATCH"]}
    assert call(view, key="four").content == b"unkeyed"
    assert call(view, key="four", method="PATCH").content == b"four"


def tenant(request):
    return "tenant:7"


def cut(response):
    return response


@pytest.mark.parametrize("name", ["SCOPE", "REDACT", "FINGERPRINT"])
def test_a_callable_may_be_given_as_its_dotted_path(settings, name):
    settings.IDEMPOTENCY = {name: f"{__name__}.tenant"}
    assert getattr(conf().policy, name.lower()) is tenant


@pytest.mark.parametrize("path", ["shop.nowhere", f"{__name__}.nothing"])
def test_a_dotted_path_that_leads_nowhere_is_an_error_that_says_which(settings, path):
    settings.IDEMPOTENCY = {"REDACT": path}
    with pytest.raises(ImproperlyConfigured, match=rf'IDEMPOTENCY\["REDACT"\] is \'{path}\', which can\'t be imported'):
        conf()


def test_a_dotted_path_must_lead_to_a_callable(settings):
    settings.IDEMPOTENCY = {"REDACT": f"{__name__}.__doc__"}
    with pytest.raises(ImproperlyConfigured, match="it must be a callable"):
        conf()


def test_the_public_scope_is_no_path(settings):
    settings.IDEMPOTENCY = {"SCOPE": "public"}
    assert conf().policy.scope == "public"
