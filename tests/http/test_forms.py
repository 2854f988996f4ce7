"""A form is submitted once, however often its button is pressed."""

from __future__ import annotations

import re
from dataclasses import replace
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync
from django import forms
from django.contrib import messages
from django.contrib.auth import get_user_model
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import AnonymousUser
from django.contrib.messages.storage.cookie import CookieStorage
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.middleware.csrf import get_token
from django.template import engines
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.cache import patch_cache_control
from django.utils.decorators import method_decorator
from django.utils.safestring import mark_safe
from django.utils.translation import gettext_lazy
from django.views.generic import FormView
from rest_framework.decorators import api_view, permission_classes

from django_idempotency.forms import FIELD, MESSAGES, idempotent_form, new_form_key
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Body, Fingerprint, Key
from testproject.models import LedgerEntry
from tests.support.callers import is_replay, references

pytestmark = [pytest.mark.drf, pytest.mark.usefixtures("transactional_db")]

PAGE = "/orders/new/"


@pytest.fixture
def buyer(client):
    client.force_login(get_user_model().objects.create(username="buyer"))
    return client


def key_in(page):
    return re.search(r'name="idempotency_key" value="([^"]+)"', page.content.decode())[
        1
    ]


def order(client, key, **content):
    return client.post(
        PAGE, {"reference": "book", "amount": 5, "idempotency_key": key, **content}
    )


def told(page):
    return re.findall(r'<p class="message">(.*?)</p>', page.content.decode())


def test_rules_for_the_keys_of_clients_do_not_apply_to_forms(buyer, settings):
    settings.IDEMPOTENCY = {"KEY": Key(pattern="order-[0-9]+", min_length=100)}
    assert order(buyer, key_in(buyer.get(PAGE))).status_code == 302


def test_a_second_submission_gets_the_first_redirect_and_its_messages(buyer):
    key = key_in(buyer.get(PAGE))
    first, message = order(buyer, key), told(buyer.get(PAGE))
    second, again = order(buyer, key), told(buyer.get(PAGE))
    assert (
        (first.status_code, first["Location"])
        == (second.status_code, second["Location"])
        == (302, PAGE)
    )
    assert (first.get("Idempotent-Replayed"), second["Idempotent-Replayed"]) == (
        None,
        "true",
    )
    assert message == again == ["Ordered book."]
    assert MESSAGES not in {*first.headers, *second.headers}, "they are not for clients"
    assert LedgerEntry.objects.count() == 1


def test_other_content_under_the_same_key_is_another_submission(buyer):
    key = key_in(buyer.get(PAGE))
    order(buyer, key)
    order(buyer, key, reference="pen")
    order(buyer, key, reference="pen")
    assert sorted(references()) == [
        "book",
        "pen",
    ]


def test_a_form_with_errors_is_shown_again_and_can_be_sent_again(buyer):
    key = key_in(buyer.get(PAGE))
    assert order(buyer, key, amount=0).status_code == 200
    assert order(buyer, key).status_code == 302
    assert LedgerEntry.objects.count() == 1


def test_another_users_submission_is_not_replayed(buyer):
    key = key_in(buyer.get(PAGE))
    order(buyer, key)
    thief = Client()
    thief.force_login(get_user_model().objects.create(username="thief"))
    assert "Idempotent-Replayed" not in order(thief, key).headers


@pytest.mark.parametrize(
    "forged",
    ["made-up", "made:up", new_form_key()[:-1]],
    ids=["no signature", "bad signature", "cut signature"],
)
def test_a_key_that_the_project_did_not_sign_is_refused(buyer, forged):
    assert order(buyer, forged).status_code == 400
    assert not LedgerEntry.objects.exists()


def test_a_form_without_the_field_runs_each_time(buyer):
    for _time in range(2):
        buyer.post(PAGE, {"reference": "book", "amount": 5})
    assert LedgerEntry.objects.count() == 2
    assert not IdempotencyRecord.objects.exists()


@idempotent_form
def sign_up(request):
    response = HttpResponse()
    response.set_cookie("who", request.headers["X-Who"])
    return response


def sign_up_as(who, **headers):
    request = RequestFactory().post("/", headers={"X-Who": who, **headers})
    request.user = AnonymousUser()
    return sign_up(request)


def test_an_anonymous_caller_can_not_make_up_a_key():
    answers = [sign_up_as(who, **{"Idempotency-Key": "1"}) for who in ("alice", "bob")]
    assert [(answer.status_code, dict(answer.cookies)) for answer in answers] == [
        (400, {})
    ] * 2
    assert not IdempotencyRecord.objects.exists()


def test_an_anonymous_submission_is_replayed_by_its_signed_key():
    key = new_form_key()
    requests = [
        RequestFactory().post("/", {FIELD: key}, headers={"X-Who": "alice"})
        for _time in range(2)
    ]
    assert [sign_up(request).cookies["who"].value for request in requests] == [
        "alice"
    ] * 2
    assert IdempotencyRecord.objects.get().scope == "form"


def visitor_with_cookie():
    get_token(request := RequestFactory().get("/"))
    visitor = Client()
    visitor.cookies["csrftoken"] = request.META["CSRF_COOKIE"]
    return visitor


def test_a_page_from_a_cache_keeps_visitors_apart(settings):
    settings.ROOT_URLCONF = (path("sign-up/", sign_up),)
    key, alice, bob = new_form_key(), visitor_with_cookie(), visitor_with_cookie()
    submissions = [
        visitor.post("/sign-up/", {FIELD: key}, headers={"X-Who": who})
        for visitor, who in ((alice, "alice"), (bob, "bob"), (alice, "alice"))
    ]
    assert [is_replay(submission) for submission in submissions] == [False, False, True]
    assert IdempotencyRecord.objects.count() == 2


def page_of_a_key(request, template="{% load idempotency %}{% idempotency_key %}"):
    response = HttpResponse(engines["django"].from_string(template).render({}, request))
    patch_cache_control(response, public=True, max_age=60)
    return response


async def async_page_of_a_key(request):
    return page_of_a_key(request)


def lazy_page_of_a_key(request):
    return TemplateResponse(
        request,
        engines["django"].from_string("{% load idempotency %}{% idempotency_key %}"),
    )


def page_without_a_key(request):
    return page_of_a_key(request, "no key")


@pytest.mark.parametrize(
    "view", [page_of_a_key, lazy_page_of_a_key, page_without_a_key]
)
def test_the_response_of_a_form_is_not_for_shared_caches(client, settings, view):
    settings.MIDDLEWARE = []
    settings.ROOT_URLCONF = (path("", idempotent_form(view)),)
    key = new_form_key()
    responses = [
        client.get("/"),
        client.post("/", {FIELD: key}),
        client.post("/", {FIELD: key}),
    ]
    for response in responses:
        assert "private" in response["Cache-Control"]
        assert "public" not in response["Cache-Control"]
    assert is_replay(responses[-1])


@pytest.mark.parametrize(
    ("view", "cached"),
    [
        (page_of_a_key, "max-age=60, private"),
        (async_page_of_a_key, "max-age=60, private"),
        (lazy_page_of_a_key, "private"),
        (page_without_a_key, "public, max-age=60"),
    ],
)
def test_the_middleware_keeps_a_page_with_a_key_from_shared_caches(
    client, async_client, settings, view, cached
):
    settings.MIDDLEWARE = ["django_idempotency.middleware.IdempotencyMiddleware"]
    settings.ROOT_URLCONF = (path("", view),)
    for get in (client.get, async_to_sync(async_client.get)):
        assert get("/")["Cache-Control"] == cached


def test_a_signed_in_user_may_send_the_header(buyer):
    submit = [
        buyer.post(
            PAGE, {"reference": "pen", "amount": 5}, headers={"Idempotency-Key": "k"}
        )
        for _ in range(2)
    ]
    assert [answer.status_code for answer in submit] == [302, 302]
    assert LedgerEntry.objects.count() == 1


def thank(request):
    messages.success(request, "Thank you.")
    return HttpResponse(uuid4().hex)


class Page(FormView):
    form_class = forms.Form

    def form_valid(self, form):
        return thank(self.request)


def thank_on_the_page(request):
    messages.success(request, "Thank you.")
    return TemplateResponse(
        request,
        engines["django"].from_string(
            "{% for each in messages %}{{ each }}{% endfor %}"
        ),
    )


def submissions(view, *contents):
    """The responses to submissions from one page, each with the messages that are left
    for the next page.
    """
    sent = {FIELD: new_form_key()}
    for content in contents:
        request = RequestFactory().post("/", sent | content)
        vars(request).update(user=AnonymousUser(), _messages=CookieStorage(request))
        response = view(request)
        yield response, [str(message) for message in request._messages._queued_messages]


VIEWS = {
    "function": idempotent_form(thank),
    "as_view()": idempotent_form(Page.as_view()),
    "REST framework": idempotent_form(
        api_view(["POST"])(permission_classes([])(thank))
    ),
    "dispatch": (
        method_decorator(idempotent_form, name="dispatch")(
            type("Decorated", (Page,), {})
        ).as_view()
    ),
    "post": (
        method_decorator(idempotent_form, name="post")(
            type("Decorated", (Page,), {})
        ).as_view()
    ),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_any_kind_is_replayed_with_its_messages(view):
    (first, told), (second, told_again) = submissions(view, {}, {})
    assert (second.content, is_replay(first), is_replay(second)) == (
        first.content,
        False,
        True,
    )
    assert told == told_again == ["Thank you."]


def test_a_class_has_a_form_behind_its_login(client, settings, atomic_requests):
    view = type("Behind", (LoginRequiredMixin, Page), {}).as_view()
    settings.ROOT_URLCONF = (path("form/", idempotent_form(view)),)
    client.force_login(get_user_model().objects.create(username="buyer"))
    key = new_form_key()
    first, second = (client.post("/form/", {FIELD: key}) for _time in range(2))
    assert (first.status_code, second.content, is_replay(second)) == (
        200,
        first.content,
        True,
    )
    client.logout()
    assert client.post("/form/", {FIELD: key}).status_code == 302


def test_a_message_that_the_page_has_shown_is_not_shown_again():
    (first, told), (second, told_again) = submissions(
        idempotent_form(thank_on_the_page), {}, {}
    )
    assert (first.content, second.content, is_replay(second)) == (
        b"Thank you.",
        b"Thank you.",
        True,
    )
    assert told == told_again == []


def test_another_csrf_token_is_the_same_content():
    first, second = submissions(
        idempotent_form(thank), *({"csrfmiddlewaretoken": token} for token in "ab")
    )
    assert (second[0].content, is_replay(second[0])) == (first[0].content, True)


class Buyers:
    """What an object of a model is in a message: its text is a query."""

    def __str__(self):
        return f"{get_user_model().objects.count()} <buyers>"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Buyers(), "0 <buyers>"),
        (mark_safe("<b>now</b>"), "<b>now</b>"),
        (gettext_lazy("yes"), "yes"),
    ],
    ids=["query", "safe", "lazy"],
)
def test_a_message_may_be_any_object(message, text):
    def view(request):
        messages.success(request, message)
        return HttpResponse(uuid4().hex)

    (first, told), (second, told_again) = submissions(idempotent_form(view), {}, {})
    assert (second.content, told, told_again) == (first.content, [text], [text])


def test_a_lazy_message_from_a_middleware_is_text_in_the_record():
    def greeted(request):
        messages.info(request, gettext_lazy("yes"))
        return idempotent_form(thank)(request)

    (_first, told), (second, told_again) = submissions(greeted, {}, {})
    assert (is_replay(second), told, told_again) == (
        True,
        ["yes", "Thank you."],
        ["yes", "yes", "Thank you."],
    )


def test_an_async_view_is_refused_where_it_is_written():
    async def view(request):
        return HttpResponse()

    with pytest.raises(
        ImproperlyConfigured,
        match=r"view is async, and @idempotent_form works only on sync views",
    ):
        idempotent_form(view)


OPTIONS = {
    "exclude": {"fingerprint": Fingerprint(exclude=["captcha"])},
    "only": {"fingerprint": Fingerprint(only=["item"])},
    "callable": {"fingerprint": lambda request: request.POST["item"].encode()},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_field_left_out_of_the_fingerprint_may_change(options):
    contents = [
        {"item": item, "captcha": captcha}
        for item, captcha in [("pen", "a"), ("pen", "b"), ("ink", "b")]
    ]
    answers = [
        answer
        for answer, _told in submissions(idempotent_form(**options)(thank), *contents)
    ]
    assert [is_replay(answer) for answer in answers] == [False, True, False]


@pytest.mark.parametrize("by_setting", [False, True])
def test_the_stored_response_to_a_form_is_redacted(settings, by_setting):
    redact = {"body": Body(redact=lambda response: replace(response, body=b"redacted"))}
    settings.IDEMPOTENCY = {"BODY": redact["body"]} if by_setting else {}
    view = idempotent_form(**({} if by_setting else redact))(thank)
    _first, (second, told) = submissions(view, {}, {})
    assert (second.content, told) == (b"redacted", ["Thank you."])


def test_messages_are_redacted_with_the_response():
    view = idempotent_form(
        body=Body(redact=lambda response: replace(response, headers=()))
    )(thank)
    _first, (second, told) = submissions(view, {}, {})
    assert (
        is_replay(second),
        told,
        IdempotencyRecord.objects.get().response_headers,
    ) == (True, [], [])
