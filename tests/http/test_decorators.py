"""``@idempotent`` before plain views: functions and classes, sync and async, below what
authenticates.
"""

from __future__ import annotations

from functools import partial

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, JsonResponse
from django.utils.decorators import method_decorator
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.exceptions import TerminalFailure
from tests.support.callers import effects, is_replay
from tests.support.views import AsyncOrder, Order, Runs, book, class_with, code
from tests.support.views_of_laws import in_each_mode


class Compiled:
    """A view that Python can't inspect, as some compiled ones."""

    __signature__ = "none"

    def __init__(self, runs):
        self.runs = runs

    def __call__(self, request):
        return self.runs.view(request)


ENTRY_POINTS = {
    "bare": lambda runs: idempotent(runs.view),
    "called": lambda runs: idempotent()(runs.view),
    "with options": lambda runs: idempotent(mode="lease", required=True)(runs.view),
    "around another": lambda runs: idempotent(require_POST(runs.view)),
    "around a decorated partial": lambda runs: idempotent(
        csrf_exempt(partial(runs.view))
    ),
    "compiled": lambda runs: idempotent(Compiled(runs)),
    "below another": lambda runs: require_POST(idempotent(runs.view)),
    "async": lambda runs: idempotent(mode="lease")(runs.aview),
    "class": lambda runs: idempotent(class_with(Order, runs)).as_view(),
    "subclass": (
        lambda runs: type("Own", (idempotent(Order),), {"runs": runs}).as_view()
    ),
    "as_view": lambda runs: csrf_exempt(
        idempotent(csrf_exempt(class_with(Order, runs).as_view()))
    ),
    "dispatch": (
        lambda runs: method_decorator(idempotent, name="dispatch")(
            class_with(Order, runs)
        ).as_view()
    ),
    "method": (
        lambda runs: method_decorator(idempotent, name="post")(
            class_with(Order, runs)
        ).as_view()
    ),
    "class with options": (
        lambda runs: idempotent(mode="lease")(class_with(Order, runs)).as_view()
    ),
    "sync_to_async": lambda runs: idempotent(mode="lease")(sync_to_async(runs.view)),
    "async class": (
        lambda runs: idempotent(mode="lease")(class_with(AsyncOrder, runs)).as_view()
    ),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_a_view_runs_once_for_each_key(call, entry_point):
    runs = Runs()
    view = entry_point(runs)
    first, second, other = call(view), call(view), call(view, key="other")
    assert (first.content, is_replay(first)) == (b"run 1", False)
    assert (second.content, is_replay(second)) == (b"run 1", True)
    assert (other.content, is_replay(other)) == (b"run 2", False)
    assert [context.key for context in runs.contexts] == ["k", "other"]


@pytest.mark.parametrize("entry_point", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_without_a_key_it_runs_each_time(call, entry_point):
    runs = Runs()
    view = entry_point(runs)
    required = entry_point is ENTRY_POINTS["with options"]
    assert [code(call(view, key=None)) for _ in range(2)] == [
        "idempotency_key_missing" if required else None
    ] * 2
    assert runs.contexts == ([] if required else [None, None])
    assert not IdempotencyRecord.objects.exists()


def test_the_decorated_view_keeps_its_name_and_its_kind():
    def view(request):
        """What it does."""

    decorated = idempotent(view)
    assert (decorated.__name__, decorated.__doc__, decorated.__wrapped__) == (
        "view",
        "What it does.",
        view,
    )
    protected = idempotent(Order)
    assert issubclass(protected, Order)
    assert (protected.__qualname__, protected.__module__, protected.__doc__) == (
        "Order",
        Order.__module__,
        Order.__doc__,
    )


def test_the_decorated_class_leaves_the_original_alone(call):
    runs = Runs()
    original = class_with(Order, runs)
    idempotent(original)
    call.settings.MIDDLEWARE = [
        path for path in call.settings.MIDDLEWARE if "Idempotency" not in path
    ]
    assert [call(original.as_view()).content for _ in range(2)] == [b"run 1", b"run 2"]


def test_attributes_that_decorators_set_on_dispatch_are_set_on_the_view():
    exempt = idempotent(
        method_decorator(csrf_exempt, name="dispatch")(class_with(Order, Runs()))
    )
    assert exempt.as_view().csrf_exempt
    overridden = type(
        "Overridden", (exempt,), {"dispatch": lambda *args, **kwargs: HttpResponse()}
    )
    assert not hasattr(overridden.as_view(), "csrf_exempt")


def test_an_async_view_in_atomic_mode_is_a_clear_error_and_not_run(call):
    runs = Runs()
    with pytest.raises(
        ImproperlyConfigured,
        match=(
            r"^tests\.support\.views\.Runs\.aview is an async view in atomic mode; set"
            r' mode="lease"'
        ),
    ):
        call(idempotent(runs.aview))
    assert runs.count == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_safe_methods_ignore_the_header(call, method):
    runs = Runs()
    view = idempotent(required=True)(runs.view)
    assert [call(view, key="é" * 300, method=method).status_code for _ in range(2)] == [
        200,
        200,
    ]
    assert runs.contexts == [None, None]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_unsafe_methods_are_protected_and_are_different_requests(call, method):
    runs = Runs()
    view = idempotent(runs.view)
    assert is_replay([call(view, method=method) for _ in range(2)][1])
    assert (
        code(call(view, method="POST" if method != "POST" else "PUT"))
        == "idempotency_key_reused"
    )
    assert runs.count == 1


def test_a_missing_method_is_405_and_leaves_the_key_free(call):
    view = idempotent(class_with(Order, Runs())).as_view()
    assert call(view, method="PUT").status_code == 405
    assert call(view, method="POST").content == b"run 1"


def raising(error):
    def answer(request):
        book(request)
        raise error

    return answer


@pytest.mark.parametrize("status", [400, 402])
@in_each_mode
def test_a_terminal_failure_is_stored_and_replayed(call, mode, status):
    runs = Runs(
        raising(TerminalFailure(JsonResponse({"declined": True}, status=status)))
    )
    view = idempotent(mode=mode)(runs.view)
    first, second = call(view), call(view)
    assert (first.status_code, second.status_code, is_replay(second), runs.count) == (
        status,
        status,
        True,
        1,
    )
    assert first.content == second.content == b'{"declined": true}'
    assert IdempotencyRecord.objects.get().status == "failed"
    assert effects() == (1 if mode == "lease" else 0)


@pytest.mark.parametrize("switched_off", [False, True])
def test_a_terminal_failure_without_a_claim_is_the_response(
    call, atomic_requests, switched_off
):
    call.settings.IDEMPOTENCY = {"ENABLED": False} if switched_off else {}
    view = idempotent(
        Runs(raising(TerminalFailure(HttpResponse("declined", status=402)))).view
    )
    response = call(view, key="k" if switched_off else None)
    assert (response.status_code, response.content) == (402, b"declined")
    assert effects() == (0 if atomic_requests else 1)


def test_a_terminal_failure_inside_rolls_back_what_the_outer_view_wrote(call):
    inner = idempotent(Runs(raising(TerminalFailure(HttpResponse(status=402)))).view)

    def outer(request):
        book(request)
        return inner(request)

    assert [(call(idempotent(outer)).status_code, effects()) for _ in range(2)] == [
        (402, 0)
    ] * 2


def test_an_async_view_that_fails_leaves_the_key_to_a_retry(call):
    async def answer(request):
        raise ValueError

    view = idempotent(mode="lease")(answer)
    for attempts in (1, 2):
        with pytest.raises(ValueError, match=r"^$"):
            call(view)
        kept = IdempotencyRecord.objects.get()
        assert (kept.status, kept.reason, kept.attempts) == (
            "failed",
            "ValueError",
            attempts,
        )


@pytest.mark.parametrize("result", [None, {"id": 7}, "text"])
@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_result_that_is_not_a_response_is_refused_before_commit(call, result, mode):
    def view(request):
        book(request)
        return result

    with pytest.raises(
        TypeError, match=f"returned {type(result).__name__}, not an HttpResponse"
    ):
        call(idempotent(mode=mode)(view))
    assert effects() == (0 if mode == "atomic" else 1)
    assert IdempotencyRecord.objects.get().status == "failed"
