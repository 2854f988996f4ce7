"""Where a key may be: in any header, in a field of the body, or where a callable finds
it.
"""

from __future__ import annotations

import json
import uuid
from operator import attrgetter

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.files.uploadhandler import MemoryFileUploadHandler
from django.http import HttpResponse
from django.http.multipartparser import MultiPartParser
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from django_idempotency import Key, Policy, body_field, idempotent, signals
from django_idempotency.forms import FIELD, idempotent_form, new_form_key
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import heard
from tests.support.reader import follow_the_quickstart, reader
from tests.support.views import Runs, api_class, code

FORM = "application/x-www-form-urlencoded"
IN_BODY = {"key": body_field("reference")}


def sent(call, view, payload, **options):
    return call(view, payload, key=None, **options)


def sent_form(call, view, fields, **options):
    body = encode_multipart(BOUNDARY, fields)
    form = {"data": body, "content_type": MULTIPART_CONTENT}
    return call(view, key=None, **form | options)


def by_rest_framework(runs, policy):
    from django_idempotency.rest_framework import IdempotentMixin

    return api_class(
        runs.view,
        IdempotentMixin,
        idempotency_policy=Policy(**{"scope": "public"} | policy),
    ).as_view()


def by_ninja(runs, policy):
    from ninja import NinjaAPI

    api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)

    @api.post("/pay")
    @idempotent(**policy)
    def pay(request):
        return runs.view(request)

    return next(it.callback for it in api.urls[0] if str(it.pattern) == "pay")


ENTRY_POINTS = {
    "decorator": lambda runs, policy: idempotent(**policy)(runs.view),
    "async": lambda runs, policy: idempotent(**{"mode": "lease"} | policy)(runs.aview),
    "form": lambda runs, policy: idempotent_form(**policy)(runs.view),
    "rest framework": by_rest_framework,
    "ninja": by_ninja,
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("is_form", [False, True])
@pytest.mark.drf
@pytest.mark.ninja
def test_a_field_of_the_body_is_the_key(call, entry_point, is_form):
    runs, send = Runs(), sent_form if is_form else sent
    view = ENTRY_POINTS[entry_point](runs, IN_BODY)
    first, again, other, without = (
        send(call, view, payload)
        for payload in (
            {"reference": "r", "amount": 1},
            {"reference": "r", "amount": 1},
            {"reference": "r", "amount": 2},
            {"amount": 1},
        )
    )
    assert (first.content, "Idempotent-Replayed" in first) == (b"run 1", False)
    assert (again.content, again["Idempotent-Replayed"]) == (b"run 1", "true")
    assert (other.status_code, without.content) == (422, b"run 2")
    assert IdempotencyRecord.objects.get().key == "r"


def test_the_middleware_takes_the_key_of_the_settings(call, settings):
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "django_idempotency.middleware.IdempotencyMiddleware",
    ]
    settings.IDEMPOTENCY = {"KEY": body_field("reference")}
    runs = Runs()
    for payload in ({"reference": "r"}, {"reference": "r"}, {"other": 1}, {"other": 1}):
        sent(call, runs.view, payload)
    assert runs.count == 3


@pytest.mark.parametrize(
    ("method", "content_type", "data", "name"),
    [
        (
            "POST",
            "application/json",
            '{"order": {"ref": "r"}}',
            "order.ref",
        ),
        (
            "PUT",
            "application/vnd.shop+json",
            '{"order.ref": "r"}',
            "order.ref",
        ),
        ("POST", FORM, "order[ref]=r&a=1", "order.ref"),
        ("PATCH", FORM, "order.ref=r", "order.ref"),
        ("PUT", MULTIPART_CONTENT, encode_multipart(BOUNDARY, {"r": "r"}), "r"),
        ("DELETE", "application/json", '{"r": "r"}', "r"),
    ],
)
def test_a_field_is_found_in_each_kind_of_body(call, method, content_type, data, name):
    runs = Runs()
    view = idempotent(key=body_field(name))(runs.view)
    for _time in range(2):
        call(view, key=None, method=method, content_type=content_type, data=data)
    assert (runs.count, IdempotencyRecord.objects.get().key) == (1, "r")


@pytest.mark.parametrize(
    "body",
    [
        *("{}", '{"reference": null}', '["reference"]', '"reference"', "", "{"),
        *("[" * 100_000, '{"reference": ' + "1" * 5000 + "}", '{"reference.x": "r"}'),
    ],
    ids=lambda body: body[:30],
)
def test_a_body_without_the_field_is_without_a_key(call, body):
    runs = Runs()
    view = idempotent(**IN_BODY)(runs.view)
    needed = idempotent(required=True, **IN_BODY)(runs.view)
    form = {"key": None, "data": body, "content_type": "application/json"}
    assert [call(view, **form).status_code for _time in range(2)] == [200, 200]
    assert code(call(needed, **form)) == "idempotency_key_missing"
    assert (runs.count, IdempotencyRecord.objects.count()) == (2, 0)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        *(
            (json.dumps({"reference": value}), "application/json")
            for value in ("", "a b", "é", "x" * 256, 1.5, True, [], {"a": 1}, "\0")
        ),
        ("reference=a&reference=b", FORM),
        ("reference=", FORM),
        ("&".join(f"{n}=1" for n in range(1001)), FORM),
        ("--x\r\nreference", "multipart/form-data; boundary=" + "x" * 300),
    ],
    ids=lambda value: value[:40],
)
def test_a_field_unfit_for_a_key_is_refused(call, body, content_type):
    runs = Runs()
    refused = call(
        idempotent(**IN_BODY)(runs.view), key=None, data=body, content_type=content_type
    )
    assert (refused.status_code, code(refused)) == (400, "idempotency_key_malformed")
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)


@pytest.mark.parametrize("content_type", ["application/json", FORM])
def test_a_body_that_is_too_large_is_refused_by_the_name_of_the_field(
    call, settings, content_type
):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 10
    view = idempotent(**IN_BODY)(Runs().view)
    body = {"data": "x" * 11, "content_type": content_type}
    refused = call(view, key=None, **body)
    assert (refused.status_code, code(refused)) == (400, "idempotency_key_malformed")
    assert "reference" in refused.json()["detail"]


def own_handlers(request):
    request.upload_handlers = [MemoryFileUploadHandler(request)]
    return HttpResponse(request.FILES["file"].read())


@pytest.mark.parametrize(
    ("content_type", "read"),
    [
        ("application/json", lambda request: HttpResponse(request.read())),
        (FORM, lambda request: HttpResponse(request.read())),
        (MULTIPART_CONTENT, lambda request: HttpResponse(request.read())),
        ("text/plain", lambda request: HttpResponse(request.read())),
        (MULTIPART_CONTENT, own_handlers),
    ],
)
def test_a_view_reads_the_stream_of_a_request_without_a_key(call, content_type, read):
    body = encode_multipart(BOUNDARY, {"file": SimpleUploadedFile("a", b"content")})
    response = call(
        idempotent(**IN_BODY)(read), key=None, data=body, content_type=content_type
    )
    assert response.content == (b"content" if read is own_handlers else body)


def test_a_large_upload_has_its_key_and_its_files(call, settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    runs = Runs(lambda request: HttpResponse(str(request.FILES["file"].size)))
    view = idempotent(**IN_BODY)(runs.view)
    for _time in range(2):
        file = SimpleUploadedFile("a", b"x" * 5000)
        response = sent_form(call, view, {"reference": "r", "file": file})
        assert response.content == b"5000"
    assert runs.count == 1


def test_a_form_is_parsed_once_for_key_fingerprint_and_view(call, monkeypatch):
    parsed, parse = [], MultiPartParser.parse
    monkeypatch.setattr(
        MultiPartParser, "parse", lambda self: parsed.append(1) or parse(self)
    )
    read = idempotent(**IN_BODY)(lambda request: HttpResponse(request.POST["amount"]))
    assert sent_form(call, read, {"reference": "r", "amount": 1}).content == b"1"
    assert parsed == [1]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("X-Once", "in the header X-Once"),
        (Key(min_length=5), "in the header Idempotency-Key"),
        (body_field("order.reference"), "the field order.reference of the body"),
        (lambda request: None, "send the same key with every retry"),
    ],
)
def test_a_missing_key_is_refused_by_where_it_was_expected(call, key, said):
    view = idempotent(required=True, key=key)(Runs().view)
    refused = sent(call, view, {"amount": 1})
    assert code(refused) == "idempotency_key_missing"
    assert said in refused.json()["detail"]
    assert refused.json()["safe_new_key"] is True


def test_a_policy_that_names_a_header_ignores_the_usual_one(call):
    runs = Runs()
    view = idempotent(key=Key(source="X-Once", min_length=2))(runs.view)
    for name, value in (("X-Once", "ab"), ("X-Once", "ab"), ("Idempotency-Key", "ab")):
        sent(call, view, None, headers={name: value})
    assert [it and it.key for it in runs.contexts] == ["ab", None]
    short = sent(call, view, None, headers={"X-Once": "a"})
    assert code(short) == "idempotency_key_malformed"
    empty = sent(call, view, None, headers={"X-Once": ""})
    assert "header X-Once" in empty.json()["detail"]


@pytest.mark.parametrize("found", ["k", 7, uuid.UUID(int=7)])
def test_a_callable_returns_the_key(call, found):
    runs = Runs()
    view = idempotent(key=lambda request: found)(runs.view)
    assert [sent(call, view, None).content for _time in range(2)] == [b"run 1"] * 2
    assert runs.contexts[0].key == str(found)


@pytest.mark.parametrize("found", [1.5, b"k", True, ["k"]])
def test_a_callable_that_returns_anything_else_is_an_error(call, found):
    view = idempotent(key=lambda request: found)(Runs().view)
    with pytest.raises(ImproperlyConfigured, match=r"key callable .* returned"):
        sent(call, view, None)


def from_the_query(request):
    return request.GET.get("reference")


PATH = f"{__name__}.from_the_query"


@pytest.mark.parametrize("stated", [PATH, Key(source=PATH, strict=True)])
def test_a_callable_of_the_settings_may_be_named(call, settings, stated):
    settings.IDEMPOTENCY = {"KEY": stated}
    runs = Runs()
    for _time in range(2):
        sent(call, idempotent(runs.view), None, path="/view/?reference=r")
    assert runs.contexts[0].key == "r"
    assert runs.count == 1


@pytest.mark.drf
def test_a_callable_sees_who_has_been_authenticated(call):
    from rest_framework.authentication import SessionAuthentication

    from django_idempotency.rest_framework import IdempotentMixin

    runs = Runs()
    view = api_class(
        runs.view,
        IdempotentMixin,
        authentication_classes=(SessionAuthentication,),
        idempotency_policy=Policy(key=attrgetter("user.username")),
    ).as_view()
    sent(call, view, None)
    assert [it.key for it in runs.contexts] == ["alice"]


@pytest.mark.parametrize("payload", [{"reference": "r"}, {"reference": None}])
def test_only_a_key_that_is_ignored_is_reported(call, payload):
    call.client.logout()
    view = idempotent(anonymous="ignore", **IN_BODY)(
        lambda request: HttpResponse(request.read())
    )
    with heard(signals.request_unprotected) as events:
        assert sent(call, view, payload).status_code == 200
    assert len(events) == bool(payload["reference"])


def test_a_form_prefers_the_key_of_its_policy(call):
    runs = Runs()
    view = idempotent_form(**IN_BODY)(runs.view)
    for _time in range(2):  # two renderings of the form
        sent_form(call, view, {"reference": "r", FIELD: new_form_key()})
    sent_form(call, view, {FIELD: new_form_key()})
    assert runs.count == 2


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_field_has_a_name(name):
    with pytest.raises(ValueError, match="takes the name of a field"):
        body_field(name)


def test_the_page_on_keys_from_the_body_does_what_it_shows(tmp_path):
    with reader(tmp_path) as someone:
        follow_the_quickstart(someone)
        follow_the_quickstart(someone, "body_keys.md")
