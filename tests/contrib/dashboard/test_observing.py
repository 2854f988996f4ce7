"""With ``OBSERVE`` nothing is refused or replayed, and what would have been prevented
is counted.
"""

from __future__ import annotations

import asyncio
import logging
import re
from base64 import b64encode

import pytest
from asgiref.sync import iscoroutinefunction
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.db import DatabaseError, connection
from django.http import HttpResponse, UnreadablePostError
from django.test import RequestFactory

from django_idempotency.contrib.dashboard import middleware
from django_idempotency.contrib.dashboard import observations as module
from django_idempotency.contrib.dashboard.activity import observed
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.dashboard.middleware import ObservingMiddleware
from django_idempotency.contrib.dashboard.models import IdempotencyObservation
from django_idempotency.contrib.dashboard.observations import (
    MOST,
    Observations,
    observations,
)
from django_idempotency.forms import FIELD, idempotent_form, new_form_key
from django_idempotency.http.placement import idempotent
from django_idempotency.maintenance.cleaner import cleanup
from django_idempotency.maintenance.stats import WEEK
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.policy import Key
from tests.contrib.dashboard.counting_process import counting
from tests.support.callers import effects, is_replay, paying, post
from tests.support.sql import sqlite_says
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("payer")

WINDOW = 600
DASHBOARD = "/admin/django_idempotency/idempotencyrecord/dashboard/"


@pytest.fixture(autouse=True)
def observing(payer, settings, monkeypatch):
    """What has been observed, from the tables."""
    settings.IDEMPOTENCY = {"DASHBOARD": {"OBSERVE": WINDOW}}
    for buffer in (counters, observations):
        buffer._reset()

    def seen():
        observations.flush()
        counters.flush()
        return observed(WEEK)

    yield seen
    for buffer in (counters, observations):
        buffer._reset()


def unkeyed(body=b'{"amount": 5}', content_type="application/json", **headers):
    return RequestFactory().post("/pay/", body, content_type, headers=headers)


def watched(view):
    """``view`` behind the middleware that watches requests."""

    def get_response(request):
        middleware.process_view(request, view, (), {})
        return view(request)

    async def aget_response(request):
        middleware.process_view(request, view, (), {})
        return await view(request)

    middleware = ObservingMiddleware(
        aget_response if iscoroutinefunction(view) else get_response
    )
    return middleware


protected = watched(idempotent(scope="public")(paying))


def protected_as(view):
    return watched(idempotent(scope="public")(view))


def found(seen):
    return seen.duplicates_keyed, seen.duplicates_unkeyed


def test_nothing_is_refused_replayed_or_recorded(observing):
    required = watched(idempotent(scope="public", required=True)(paying))
    responses = [
        required(request)
        for request in (post(), post(), post(body=b"{}"), post("x" * 300), unkeyed())
    ]
    assert [response.status_code for response in responses] == [201] * 5
    assert not any(map(is_replay, responses))
    assert (effects(), IdempotencyRecord.objects.count()) == (5, 0)


def test_duplicates_are_counted_with_a_key_and_without(observing):
    for request in (
        post(),
        post(),
        post("other"),
        post(body=b"{}"),
        unkeyed(),
        unkeyed(),
        unkeyed(b'{ "amount":5 }'),
    ):
        protected(request)
    seen = observing()
    assert (seen.keyed, seen.unkeyed, *found(seen), seen.preventable) == (4, 3, 1, 2, 3)
    assert seen.views == {"tests.support.callers.paying": 3}


class HungUp:
    """What a server reads from a caller who is gone."""

    def read(self, *args):
        raise OSError("the caller has hung up")

    readline = read


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    "read",
    [lambda r: r.POST, lambda r: r.body, lambda r: r.read(9)],
    ids=["form", "body", "read"],
)
def test_a_view_learns_that_its_caller_has_hung_up(observing, read):
    """Django shows it an empty form instead, once somebody else has tried to read."""
    request = RequestFactory().post(
        "/pay/", "amount=5", FORM, **{"wsgi.input": HungUp()}
    )
    with pytest.raises(UnreadablePostError, match="hung up"):
        protected_as(read)(request)


@pytest.mark.server
@pytest.mark.parametrize(("seconds", "way"), [(0.05, "end"), (3600, "terminate")])
def test_real_processes_compare_in_the_background_and_at_their_end(seconds, way):
    with counting(seconds, WINDOW) as one, counting(seconds, WINDOW) as other:
        for process in (one, other):
            process.begin("k", 20)
        for process in (one, other):
            process.finish()
        for process in (one, other):
            getattr(process, way)()
    seen = observed(WEEK)
    assert (seen.keyed, found(seen), effects()) == (40, (39, 0), 40)


@pytest.mark.row_locks
def test_duplicates_written_at_the_same_time_are_counted(observing, monkeypatch):
    several = [Observations() for _process in range(4)]
    for of_process in several:
        monkeypatch.setattr(middleware, "observations", of_process)
        protected(unkeyed())
    observations._reset()
    in_threads(4, lambda index: several[index].flush())
    assert found(observing()) == (0, 3)


def test_a_request_older_than_the_window_is_not_a_duplicate(observing):
    protected(unkeyed())
    observing()
    IdempotencyObservation.objects.update(seen_at=ahead(-WINDOW - 30))
    protected(unkeyed())
    assert found(observing()) == (0, 0)
    IdempotencyObservation.objects.update(seen_at=ahead(-WINDOW + 30))
    protected(unkeyed())
    assert found(observing()) == (0, 1)


@pytest.mark.parametrize("status", [400, 409, 500])
def test_a_retry_of_a_failure_is_not_a_duplicate(observing, status):
    failing = protected_as(lambda request: HttpResponse(status=status))
    for _time in range(2):
        failing(unkeyed())
    seen = observing()
    assert (seen.unkeyed, found(seen)) == (2, (0, 0))


def test_requests_of_different_scopes_are_not_duplicates(observing):
    each = watched(idempotent(scope=lambda request: request.headers["X-User"])(paying))
    for user in ("a", "b", "b"):
        each(unkeyed(**{"X-User": user}))
    assert found(observing()) == (0, 1)


def test_a_process_keeps_so_many_digests(observing, monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    for number in range(3):
        protected(unkeyed(str(number).encode()))
    assert len(observations._seen) == 2 < MOST


def test_only_a_digest_and_a_time_are_stored(observing):
    protected(post("secret-key"))
    observing()
    ((digest, _seen_at, found),) = IdempotencyObservation.objects.values_list()
    assert (len(digest.bytes), found) == (16, 0)


def test_observing_does_not_add_statements_to_a_request(
    observing, django_assert_num_queries, settings
):
    plain = protected_as(lambda request: HttpResponse())
    with django_assert_num_queries(0):
        plain(unkeyed())
        plain(post())
    # However many requests there were: the comparison (on MySQL with a SELECT in a
    # block), and then the counters, behind a look at the oldest pending key.
    with django_assert_num_queries(
        3 if connection.features.can_return_rows_from_bulk_insert else 6
    ):
        observations.flush()
        counters.flush()


def fails(request):
    raise LookupError("secret")


@pytest.mark.parametrize(
    "policy",
    [{"scope": fails}, {"scope": "public", "fingerprint": fails}],
    ids=["scope", "print"],
)
def test_an_error_is_logged_and_the_request_goes_on(observing, caplog, policy):
    failing = watched(idempotent(**policy)(paying))
    with caplog.at_level(logging.ERROR, "django_idempotency"):
        assert [failing(unkeyed()).status_code for _time in range(2)] == [201, 201]
    (record,) = caplog.records
    assert (record.event, record.view) == ("observing", "tests.support.callers.paying")
    assert "secret" not in record.getMessage()
    assert record.exc_info is None


def test_an_error_of_the_database_drops_what_was_seen(observing, monkeypatch):
    protected(unkeyed())
    with monkeypatch.context() as patch:
        patch.setitem(module._MERGE, connection.vendor, "no SQL")
        with pytest.raises(DatabaseError):
            observations.flush()
    protected(unkeyed())
    assert found(observing()) == (0, 0)


def test_an_upload_is_left_to_its_view(observing):
    def handlers(request):
        # raises once the request has been parsed, or its body read
        request.upload_handlers = []
        return HttpResponse()

    view = protected_as(handlers)
    assert view(RequestFactory().post("/", upload(b"content"))).status_code == 200
    stored = protected_as(
        lambda request: HttpResponse([f.close() for f in request.FILES.values()])
    )
    assert stored(RequestFactory().post("/", upload(b"x"))).status_code == 200
    seen = observing()
    assert (seen.unkeyed, found(seen)) == (2, (0, 0))


def upload(content):
    return {"file": SimpleUploadedFile("a.txt", content)}


@pytest.mark.parametrize(
    ("read", "forms"),
    [
        (
            lambda request: HttpResponse(request.POST["a"]),
            [{"a": "1"}, {"a": "1"}, {"a": "2"}],
        ),
        (lambda request: HttpResponse(), [upload(b"x"), upload(b"x"), upload(b"y")]),
    ],
    ids=["parsed by the view", "not read by the view"],
)
def test_a_form_is_compared(observing, read, forms):
    view = protected_as(read)
    for form in forms:
        view(RequestFactory().post("/", form))
    assert found(observing()) == (0, 1)


@pytest.mark.parametrize("setting", ["DIGEST_KEYS", "ENCRYPTION_KEYS"])
def test_duplicates_are_counted_with_keys_for_digests(
    observing, settings, setting, caplog
):
    settings.IDEMPOTENCY |= {setting: [b64encode(bytes(range(32))).decode()]}
    for request in (post(), post(), unkeyed(), unkeyed()):
        protected(request)
    assert (found(observing()), caplog.records) == ((1, 1), [])


def test_requests_that_would_be_refused_are_counted(observing):
    view = watched(idempotent(required=True, key=Key(min_length=2))(paying))
    for request in (unkeyed(), post("x" * 300), post("a"), post("anonymous")):
        view(request)
    ignoring = watched(idempotent(anonymous="ignore")(paying))
    for request in (post(), unkeyed()):
        ignoring(request)
    seen = observing()
    assert (seen.refused, seen.unprotected) == (4, 1)


@pytest.mark.parametrize("size", [10, 11])
def test_a_body_can_be_streamed_whether_it_was_kept_or_is_too_large(
    observing, settings, size
):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
    view = protected_as(lambda request: HttpResponse(request.read()))
    for _time in range(2):
        assert view(unkeyed(b"x" * size)).content == b"x" * size
    assert found(observing()) == (0, 1 if size == 10 else 0)


def test_an_async_view_is_observed(observing):
    @idempotent(scope="public", mode="lease")
    async def pay(request):
        return HttpResponse()

    for _time in range(2):
        asyncio.run(watched(pay)(unkeyed()))
    assert found(observing()) == (0, 1)


def test_a_form_is_watched_and_never_refused(observing):
    view = watched(idempotent_form(paying))
    key = new_form_key()
    for sent in (key, key, "forged"):
        assert (
            view(RequestFactory().post("/", {FIELD: sent, "a": "1"})).status_code == 201
        )
    seen = observing()
    assert (seen.keyed, seen.unkeyed, found(seen)) == (2, 1, (1, 0))


def test_nested_entry_points_count_once(observing):
    inner = idempotent(scope="public")(paying)
    protected_as(lambda request: inner(request))(unkeyed())
    assert observing().unkeyed == 1


def test_views_that_only_the_middleware_covers_are_observed(observing, settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"OBSERVE": WINDOW}, "SCOPE": "public"}
    settings.MIDDLEWARE = ["django_idempotency.middleware.IdempotencyMiddleware"]
    for request in (unkeyed(), unkeyed(), RequestFactory().get("/")):
        watched(paying)(request)
    seen = observing()
    assert (seen.unkeyed, found(seen), seen.views) == (
        2,
        (0, 1),
        {"tests.support.callers.paying": 1},
    )


@pytest.mark.drf
def test_rest_framework_is_observed(observing, alice):
    from rest_framework.response import Response
    from rest_framework.test import force_authenticate
    from rest_framework.views import APIView

    from django_idempotency.rest_framework import IdempotentMixin

    class Pay(IdempotentMixin, APIView):
        def post(self, request):
            return Response(request.data)

    for keyed in (False, False, True):
        request = post() if keyed else unkeyed()
        force_authenticate(request, alice)
        assert watched(Pay.as_view())(request).data == {"amount": 5}
    seen = observing()
    assert (seen.keyed, seen.unkeyed, found(seen)) == (1, 2, (0, 1))


def test_the_dashboard_and_the_command_show_what_would_have_been_prevented(
    observing, settings, admin_client, capsys
):
    for _time in range(3):
        protected(unkeyed())
    observing()
    call_command("idempotency_stats")
    told = capsys.readouterr().out
    assert re.search(r"would have been prevented +2\n", told)
    assert "at tests.support.callers.paying" in told
    page = admin_client.get(DASHBOARD).content.decode()
    assert "Would have been prevented" in page
    settings.IDEMPOTENCY = {}
    assert "Observed" not in admin_client.get(DASHBOARD).content.decode()


@pytest.mark.parametrize("second", ["12:00:05", "12:00:05.120000"])
def test_sqlite_keeps_times_as_django_writes_them(second):
    """It compares text, so that otherwise some digests outlived the window."""
    time = module._AGO["sqlite"].replace("%s", "0.0")
    assert sqlite_says(time, f"2026-11-29 {second}") == f"2026-11-29 {second}"


def test_cleaning_up_deletes_what_is_past_the_window(observing, settings):
    for body in (b"1", b"2"):
        protected(unkeyed(body))
    observing()
    IdempotencyObservation.objects.filter(
        pk=IdempotencyObservation.objects.first().pk
    ).update(seen_at=ahead(-WINDOW - 9))
    cleanup()
    assert IdempotencyObservation.objects.count() == 1
    settings.IDEMPOTENCY = {}
    cleanup()
    assert IdempotencyObservation.objects.count() == 0
