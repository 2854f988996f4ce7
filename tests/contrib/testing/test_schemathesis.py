"""The check for Schemathesis, against views that answer over HTTP."""

from __future__ import annotations

import pytest

from tests.support.callers import effects

pytestmark = [pytest.mark.schemathesis, pytest.mark.usefixtures("payer")]


@pytest.fixture
def called(shop):
    import schemathesis
    from pytest_django.live_server_helper import LiveServer

    from django_idempotency.contrib.testing.schemathesis import replays_keyed_request

    server = LiveServer("localhost")

    def call(path, **headers):
        operation = {"post": {"responses": {"201": {"description": "ok"}}}}
        raw = {"openapi": "3.1.0", "info": {"title": "Shop", "version": "1"}, "paths": {path: operation}}
        case = schemathesis.openapi.from_dict(raw)[path]["POST"].Case(headers=headers)
        case.call_and_validate(base_url=server.url, checks=[replays_keyed_request])

    yield call
    server.stop()


def test_a_protected_view_passes(called):
    called("/orders/", **{"Idempotency-Key": "k"})
    assert effects() == 1


@pytest.mark.parametrize(("path", "fault"), [("/unprotected/", "body b"), ("/pointed/", "status 201, then 200")])
def test_a_broken_view_fails(called, path, fault):
    with pytest.raises(BaseException, match=fault):  # a group of Schemathesis' own
        called(path, **{"Idempotency-Key": "k"})


def test_a_request_without_a_key_is_sent_once(called):
    called("/unprotected/")
    assert effects() == 1
