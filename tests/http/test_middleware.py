"""``IdempotencyMiddleware`` covers views that have no entry point, inside whatever
checks who may call them.
"""

from __future__ import annotations

from functools import partial, wraps

import pytest
from asgiref.sync import sync_to_async
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.decorators import (
    login_required,
    permission_required,
    user_passes_test,
)
from django.contrib.auth.mixins import (
    LoginRequiredMixin,
    PermissionRequiredMixin,
    UserPassesTestMixin,
)
from django.contrib.auth.models import Permission
from django.http import HttpResponse
from django.test import Client
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST

from django_idempotency.http.placement import (
    behind_entry_point,
    idempotency_exempt,
    idempotent,
)
from django_idempotency.models import IdempotencyRecord
from testproject.models import LedgerEntry
from tests.support.callers import is_replay
from tests.support.views import AsyncOrder, Order, Runs, class_with, code

PERMISSION = "testproject.add_ledgerentry"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"


def viewed(runs, *bases, **attributes):
    return type(
        "Covered", (*bases, View), {"runs": runs, "post": Order.post} | attributes
    ).as_view()


def timed(prefix):
    """A decorator with arguments, as projects write them."""

    def decorate(view):
        @wraps(view)
        def wrapper(request, *args, **kwargs):
            response = view(request, *args, **kwargs)
            response.headers["X-Timed"] = prefix
            return response

        return wrapper

    return decorate


UNGUARDED = {
    "function": lambda runs: runs.view,
    "partial": lambda runs: partial(runs.view, more=1),
    "decorated": lambda runs: never_cache(
        require_POST(csrf_exempt(timed("a")(runs.view)))
    ),
    "async": lambda runs: runs.aview,
    "sync_to_async": lambda runs: sync_to_async(runs.view),
    "decorated async": lambda runs: never_cache(require_POST(csrf_exempt(runs.aview))),
    "class": lambda runs: viewed(runs),
    "decorated class": lambda runs: timed("a")(csrf_exempt(viewed(runs))),
    "async class": lambda runs: viewed(runs, post=AsyncOrder.post),
}
NEEDS_LOGIN = {
    "login_required": lambda runs: login_required(runs.view),
    "decorators in a row": lambda runs: never_cache(
        login_required(require_POST(timed("a")(runs.view)))
    ),
    "async login_required": lambda runs: login_required(runs.aview),
    "LoginRequiredMixin": lambda runs: viewed(runs, LoginRequiredMixin),
    "around as_view": lambda runs: login_required(viewed(runs)),
    "method_decorator on dispatch": (
        lambda runs: method_decorator(login_required, name="dispatch")(
            class_with(Order, runs)
        ).as_view()
    ),
}
NEEDS_PERMISSION = {
    "permission_required": lambda runs: permission_required(PERMISSION)(runs.view),
    "user_passes_test": lambda runs: user_passes_test(
        lambda user: user.has_perm(PERMISSION)
    )(runs.view),
    "PermissionRequiredMixin": lambda runs: viewed(
        runs, PermissionRequiredMixin, permission_required=PERMISSION
    ),
    "UserPassesTestMixin": lambda runs: viewed(
        runs,
        UserPassesTestMixin,
        test_func=lambda view: view.request.user.has_perm(PERMISSION),
    ),
}
GUARDED = NEEDS_LOGIN | NEEDS_PERMISSION


@pytest.fixture
def permission(alice):
    alice.user_permissions.add(Permission.objects.get(codename="add_ledgerentry"))


@pytest.mark.parametrize("send", ["__call__", "asgi"])
@pytest.mark.parametrize(
    "make", (UNGUARDED | GUARDED).values(), ids=UNGUARDED | GUARDED
)
def test_the_middleware_covers_a_view_under_wsgi_and_asgi(call, permission, make, send):
    runs = Runs()
    view = make(runs)
    answers = [getattr(call, send)(view, key=key) for key in ("k", "k", "other")]
    assert [answer.content for answer in answers] == [b"run 1", b"run 1", b"run 2"]
    assert [is_replay(answer) for answer in answers] == [False, True, False]
    assert [context.key for context in runs.contexts] == ["k", "other"]


@pytest.mark.parametrize("send", ["__call__", "asgi"])
@pytest.mark.parametrize("guard", GUARDED)
def test_a_replay_is_withheld_from_callers_the_view_would_refuse_now(
    call, alice, permission, guard, send
):
    view = GUARDED[guard](Runs())
    assert call(view).content == b"run 1"
    if guard in NEEDS_LOGIN:
        call.client.logout()
    else:
        alice.user_permissions.clear()
    refused = getattr(call, send)(view)
    assert refused.status_code in (302, 403)
    assert (is_replay(refused), b"run 1" in refused.content) == (False, False)


@pytest.mark.parametrize("position", ["before ours", "after ours", "decorator"])
def test_csrf_is_checked_on_replays(call, alice, settings, position):
    protection = csrf_protect if position == "decorator" else lambda view: view
    others = [path for path in settings.MIDDLEWARE if path != CSRF]
    settings.MIDDLEWARE = {
        "before ours": [CSRF, *others],
        "after ours": [*others, CSRF],
    }.get(position, others)
    call.client = Client(enforce_csrf_checks=True)
    call.client.force_login(alice)
    call.client.cookies["csrftoken"] = token = "t" * 32
    runs = Runs()
    view = protection(runs.view)
    assert is_replay([call(view, headers={"X-CSRFToken": token}) for _ in range(2)][1])
    refused = call(view)
    assert (refused.status_code, is_replay(refused), runs.count) == (403, False, 1)
    assert call(csrf_exempt(Runs().view), key="exempt").content == b"run 1"


def test_headers_that_decorators_add_are_added_to_replays(call):
    assert [call(timed("a")(Runs().view)).headers["X-Timed"] for _ in range(2)] == [
        "a",
        "a",
    ]


def test_the_decorators_of_the_view_itself_are_left_as_they_were(call):
    runs = Runs()
    view = timed("a")(runs.view)
    call(view)
    assert behind_entry_point(view) is behind_entry_point(view) is not view
    assert view.__wrapped__ == runs.view
    assert runs.view in [cell.cell_contents for cell in view.__closure__]


class Exempt(Order):
    @idempotency_exempt
    def post(self, request, *args, **kwargs):
        return self.runs.view(request)


EXEMPT = {
    "function": lambda runs: idempotency_exempt(lambda request: runs.view(request)),
    "class": lambda runs: idempotency_exempt(class_with(Order, runs)).as_view(),
    "dispatch": (
        lambda runs: method_decorator(idempotency_exempt, name="dispatch")(
            class_with(Order, runs)
        ).as_view()
    ),
    "method": lambda runs: class_with(Exempt, runs).as_view(),
    "decorated": lambda runs: timed("a")(idempotency_exempt(viewed(runs))),
}


@pytest.mark.parametrize("make", EXEMPT.values(), ids=EXEMPT)
def test_an_exempt_view_is_left_alone(call, make):
    view = make(Runs())
    assert [call(view).content for _ in range(2)] == [b"run 1", b"run 2"]
    assert not IdempotencyRecord.objects.exists()


def test_another_method_of_the_class_is_covered(call):
    view = type("Covered", (Exempt,), {"runs": Runs(), "put": Order.post}).as_view()
    assert [call(view, method="PUT").content for _ in range(2)] == [b"run 1", b"run 1"]


def test_exactly_the_exempt_path_is_left_alone(call, settings):
    settings.IDEMPOTENCY = {"EXEMPT_PATHS": [r"^/view/\d+/$", "^/hooks/"]}
    runs = Runs()
    assert [call(runs.view, path="/view/7/").content for _ in range(2)] == [
        b"run 1",
        b"run 2",
    ]
    assert [call(runs.view, path="/view/").content for _ in range(2)] == [
        b"run 3",
        b"run 3",
    ]


def test_a_required_key_is_required_of_every_covered_view(call, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    runs = Runs()
    assert code(call(runs.view, key=None)) == "idempotency_key_missing"
    assert call(runs.view, key=None, method="GET").status_code == 200
    assert runs.count == 1


def test_async_views_use_lease_mode_and_sync_ones_the_setting(call):
    call(Runs().aview, key="async")
    call.asgi(Runs().view, key="sync")
    assert dict(IdempotencyRecord.objects.values_list("key", "mode")) == {
        "async": "lease",
        "sync": "atomic",
    }


def test_a_view_gets_its_arguments(call):
    def view(request, pk):
        return HttpResponse(str(pk))

    async def aview(request, pk):
        return HttpResponse(str(pk))

    assert (
        call(view, path="/view/7/", key="a").content
        == call.asgi(aview, path="/view/7/", key="b").content
        == b"7"
    )


class Steps(Order):
    """Makes its arguments of others, as a wizard does."""

    names: dict[int, str] = {}

    @classmethod
    def as_view(cls, steps, **initkwargs):
        return super().as_view(
            names={place: step.upper() for place, step in steps}, **initkwargs
        )

    def post(self, request):
        super().post(request)
        return HttpResponse(f"{self.names} {self.runs.count}")


@pytest.mark.parametrize(
    "entry_point", [lambda view: view, idempotent], ids=["middleware", "decorator"]
)
def test_a_class_may_change_its_arguments(call, settings, entry_point):
    runs = Runs()
    view = entry_point(class_with(Steps, runs).as_view([(0, "cart")]))
    assert [call(view).content for _ in range(2)] == [b"{0: 'CART'} 1"] * 2
    if apps.is_installed("django_idempotency.contrib.dashboard"):
        settings.IDEMPOTENCY = {"DASHBOARD": {"OBSERVE": 60}}
    assert call(view, key=None).content == b"{0: 'CART'} 2"


@pytest.fixture
def anna(transactional_db, django_user_model, settings):
    settings.IDEMPOTENCY = {"REQUIRED": True}
    client = Client()
    client.force_login(
        django_user_model.objects.create_superuser("anna", password="secret")
    )
    return client


class Entries(admin.ModelAdmin):
    fields = ("kind", "user", "amount", "currency", "reference")

    def get_urls(self):
        return [
            path("close/", self.admin_site.admin_view(self.close)),
            *super().get_urls(),
        ]

    def close(self, request):
        return HttpResponse("closed")


def test_the_middleware_does_not_require_a_key_of_the_admin(anna, settings):
    site = admin.AdminSite()
    site.register(LedgerEntry, Entries)
    settings.ROOT_URLCONF = (path("admin/", site.urls),)
    login = anna.post(
        "/admin/login/", {"username": "anna", "password": "secret", "next": "/admin/"}
    )
    assert (login.status_code, login["Location"]) == (
        302,
        "/admin/",
    ), "signed in already, and again"
    entry = {
        "kind": "deposit",
        "user": login.wsgi_request.user.pk,
        "amount": 5,
        "currency": "eur",
        "reference": "pen",
    }
    assert anna.post("/admin/testproject/ledgerentry/add/", entry).status_code == 302
    assert LedgerEntry.objects.count() == 1
    assert anna.post("/admin/testproject/ledgerentry/close/").content == b"closed"
    assert anna.post("/admin/logout/").status_code == 200


def test_the_middleware_requires_a_key_of_pages_below_the_admins_path(anna, settings):
    own = [path("report/", lambda request: HttpResponse("done"))]
    settings.ROOT_URLCONF = (path("admin/", include((own, "admin"))),)
    assert anna.post("/admin/report/").json()["code"] == "idempotency_key_missing"
