"""The decorators of a method run on replays, as those of a function do."""

from __future__ import annotations

from functools import wraps
from inspect import iscoroutinefunction

import pytest
from django.contrib.auth.decorators import permission_required
from django.contrib.auth.models import Permission
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.test import Client
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_protect

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from tests.support.callers import is_replay
from tests.support.views import AsyncOrder, Order, Runs, api_class, class_with

pytestmark = pytest.mark.django_db
PERMISSION = "testproject.add_ledgerentry"
permitted = permission_required(PERMISSION, raise_exception=True)


def written_for_methods(method):
    """A project's own decorator: a closure over the method itself."""

    @wraps(method)
    def wrapper(self, request, *args, **kwargs):
        if not request.user.has_perm(PERMISSION):
            return HttpResponse(status=403)
        return method(self, request, *args, **kwargs)

    return wrapper


def on_the_class(decorator):
    return lambda cls: method_decorator(decorator, name="post")(cls)


def on_the_method(decorate):
    def decorated(cls):
        return type("Decorated", (cls,), {"post": decorate(cls.post)})

    return decorated


GUARDS = {
    "on the class": on_the_class(permitted),
    "on the method": on_the_method(method_decorator(permitted)),
    "several": on_the_class([permitted, csrf_protect]),
    "in a row": on_the_method(
        lambda post: method_decorator(permitted)(method_decorator(csrf_protect)(post))
    ),
    "around a transaction": on_the_method(
        lambda post: method_decorator(permitted)(
            method_decorator(transaction.atomic)(post)
        )
    ),
    "around a transaction, in one list": on_the_class([permitted, transaction.atomic]),
    "further outside, in one list": on_the_class(
        (csrf_protect, permitted, transaction.atomic(), never_cache)
    ),
    "of dispatch": lambda cls: method_decorator(
        [permitted, transaction.atomic], name="dispatch"
    )(cls),
    "written for methods": on_the_method(written_for_methods),
}
VIEWS = {
    "middleware": lambda cls: cls.as_view(),
    "decorator": lambda cls: idempotent(cls).as_view(),
    "as_view": lambda cls: idempotent(cls.as_view()),
}
ASYNC = {"on the class", "on the method"}


def plain(runs):
    return class_with(Order, runs)


def asynchronous(runs):
    return type("Order", (AsyncOrder,), {"runs": runs})


def api(runs):
    from rest_framework.authentication import SessionAuthentication
    from rest_framework.response import Response

    return api_class(
        lambda request: Response(runs.view(request).content.decode()),
        authentication_classes=(SessionAuthentication,),
    )


def api_of_responses(runs):
    return api_class(runs.view, authentication_classes=api(runs).authentication_classes)


@pytest.fixture
def permission(alice):
    alice.user_permissions.add(Permission.objects.get(codename="add_ledgerentry"))


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    ("guard", "base"),
    [
        *(pytest.param(guard, plain, id=name) for name, guard in GUARDS.items()),
        *(
            pytest.param(guard, asynchronous, id=f"async, {name}")
            for name, guard in GUARDS.items()
            if name in ASYNC
        ),
        *(
            pytest.param(guard, api, id=f"api, {name}", marks=pytest.mark.drf)
            for name, guard in GUARDS.items()
            if name != "of dispatch"  # refused: the mixin is inside of it
        ),
    ],
)
def test_a_replay_is_withheld_from_callers_a_decorator_refuses(
    guard, base, entry_point, call, alice, permission, settings
):
    if base is asynchronous and entry_point is not VIEWS["middleware"]:
        settings.IDEMPOTENCY = {"MODE": "lease"}
    runs = Runs()
    view = entry_point(guard(base(runs)))
    answers = [call(view) for _time in range(2)]
    assert [is_replay(answer) for answer in answers] == [False, True]
    assert (runs.count, answers[0].content) == (1, answers[1].content)
    alice.user_permissions.clear()
    refused = [call(view, key=key) for key in ("k", "new")]
    assert [each.status_code for each in refused] == [403, 403]
    assert runs.count == 1


@pytest.mark.drf
def test_the_actions_of_a_viewset_are_decorated_methods_too(call, alice, permission):
    from rest_framework.decorators import action
    from rest_framework.response import Response
    from rest_framework.viewsets import ViewSet

    runs = Runs()

    class Charges(ViewSet):
        authentication_classes = api(runs).authentication_classes

        @action(detail=False, methods=["post"])
        @method_decorator(permitted)
        def refund(self, request):
            return Response(runs.view(request).content.decode())

    view = Charges.as_view({"post": "refund"})
    assert is_replay([call(view) for _time in range(2)][1])
    alice.user_permissions.clear()
    assert (call(view).status_code, runs.count) == (403, 1)


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
def test_csrf_is_checked_on_the_replays_of_a_method(entry_point, call, alice, settings):
    settings.MIDDLEWARE = [
        each for each in settings.MIDDLEWARE if "CsrfView" not in each
    ]
    call.client = Client(enforce_csrf_checks=True)
    call.client.force_login(alice)
    call.client.cookies["csrftoken"] = token = "t" * 32
    runs = Runs()
    view = entry_point(on_the_class(csrf_protect)(plain(runs)))
    assert is_replay([call(view, headers={"X-CSRFToken": token}) for _ in range(2)][1])
    assert (call(view).status_code, runs.count) == (403, 1)


def as_json(method):
    """It makes a response of what the method returns, and can't take one."""

    @wraps(method)
    def wrapper(*args, **kwargs):
        return JsonResponse(dict(method(*args, **kwargs)), status=201)

    return wrapper


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    "decorate",
    [on_the_method(as_json), on_the_class(as_json)],
    ids=["function", "method_decorator"],
)
def test_the_response_that_a_decorator_makes_is_stored(decorate, entry_point, call):
    runs = Runs(lambda request: {"run": runs.count})
    view = entry_point(decorate(plain(runs)))
    answers = [call(view) for _time in range(2)]
    assert [answer.content for answer in answers] == [b'{"run": 1}'] * 2
    assert [answer.status_code for answer in answers] == [201, 201]
    assert is_replay(answers[1])


def changed(response):
    response.headers["X-Length"] = str(len(response.content))
    response.set_cookie("seen", "1")
    response.content += b"!"
    response.xframe_options_exempt = True  # says that to a middleware
    return response


def changing(method):
    """It changes the response that the method returns."""

    @wraps(method)
    def wrapper(*args, **kwargs):
        return changed(method(*args, **kwargs))

    @wraps(method)
    async def awrapper(*args, **kwargs):
        return changed(await method(*args, **kwargs))

    return awrapper if iscoroutinefunction(method) else wrapper


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    "base",
    [plain, asynchronous, pytest.param(api_of_responses, marks=pytest.mark.drf)],
)
def test_a_decorator_does_not_change_a_replay(base, entry_point, call, settings):
    """What it makes of the first response is stored, or of each if it is async."""
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "django.middleware.clickjacking.XFrameOptionsMiddleware",
    ]
    if base is asynchronous and entry_point is not VIEWS["middleware"]:
        settings.IDEMPOTENCY = {"MODE": "lease"}
    view = entry_point(on_the_method(changing)(base(Runs())))
    first, second = call(view), call(view)
    assert is_replay(second)
    assert (first.content, second.content) == (b"run 1!", b"run 1!")
    assert (first.headers["X-Length"], second.headers["X-Length"]) == ("5", "5")
    assert "seen" in first.cookies
    assert ("seen" in second.cookies) is (base is asynchronous)
    for each in (first, second):
        assert "X-Frame-Options" not in each.headers


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
def test_decorators_of_one_list_keep_their_order(entry_point, call):
    runs, seen = Runs(), []

    def notes(name):
        def note(view):
            @wraps(view)
            def wrapper(request, *args, **kwargs):
                seen.append(name)
                return view(request, *args, **kwargs)

            return wrapper

        return note

    guards = [notes("a"), notes("b"), transaction.atomic, notes("c"), notes("d")]
    view = entry_point(on_the_class(guards)(plain(runs)))
    assert is_replay([call(view) for _time in range(2)][1])
    assert "".join(seen) == "abcd" + "ab"


@pytest.mark.parametrize("entry_point", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(
    "guards",
    [[transaction.atomic, permitted], [transaction.atomic]],
    ids=["inside", "alone"],
)
def test_the_entry_point_is_around_a_transaction(guards, entry_point, call):
    """Inside, no other session would see the claim."""
    runs = Runs()
    view = entry_point(on_the_class(guards)(plain(runs)))
    assert call(view, key="k").status_code == (403 if permitted in guards else 200)
    kept = IdempotencyRecord.objects.filter(key="k").count()
    assert kept == (permitted not in guards)
