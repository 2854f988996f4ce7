"""Views that answer in ``dispatch()``, as those for GraphQL do, are protected or
reported.
"""

from __future__ import annotations

import logging

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.views import View

from django_idempotency.http.placement import idempotent
from tests.support.callers import is_replay
from tests.support.views import Runs, api_class, code


def graphql(runs):
    return type(
        "GraphQL", (View,), {"dispatch": lambda self, request: runs.view(request)}
    )


def async_graphql(runs):
    async def dispatch(self, request):
        return await sync_to_async(runs.view)(request)

    return type("GraphQL", (View,), {"dispatch": dispatch, "view_is_async": True})


def graphene(runs):
    """Its ``__init__`` takes its own arguments alone, and keeps them from
    ``View``'s.
    """

    def __init__(self, schema=None):
        self.schema = schema

    return type(
        "GraphQL",
        (View,),
        {"schema": None, "__init__": __init__, "dispatch": graphql(runs).dispatch},
    )


def not_allowed(runs):
    return type(
        "Answers",
        (View,),
        {"http_method_not_allowed": lambda self, request: runs.view(request)},
    )


def unused(runs, handler="post"):
    return type(
        "Unused",
        (View,),
        {"dispatch": lambda self, request: runs.view(request), handler: View.options},
    )


def unused_for_another_method(runs):
    return unused(runs, "get")


SHAPES = {
    "dispatch": graphql,
    "own arguments": graphene,
    "http_method_not_allowed": not_allowed,
    "a handler for another method": unused_for_another_method,
}
DECORATED = {"middleware": lambda view, **policy: view, "decorator": idempotent}


@pytest.mark.parametrize("send", ["__call__", "asgi"])
@pytest.mark.parametrize("entry_point", DECORATED.values(), ids=DECORATED)
@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_a_view_without_a_handler_runs_once(call, make, entry_point, send):
    runs = Runs()
    view = entry_point(make(runs)).as_view()
    first, second = (getattr(call, send)(view) for _time in range(2))
    assert (first.content, second.content, runs.count) == (b"run 1", b"run 1", 1)
    assert (is_replay(first), is_replay(second)) == (False, True)


@pytest.mark.parametrize("send", ["__call__", "asgi"])
def test_an_async_view_without_a_handler_runs_once(call, send):
    runs = Runs()
    view = idempotent(mode="lease")(async_graphql(runs)).as_view()
    assert [getattr(call, send)(view).content for _time in range(2)] == [
        b"run 1",
        b"run 1",
    ]


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_a_view_without_a_handler_requires_its_key(call, make):
    runs = Runs()
    response = call(idempotent(required=True)(make(runs)).as_view(), key=None)
    assert (code(response), runs.count) == ("idempotency_key_missing", 0)


def of_rest_framework(runs):
    return type("Unused", (unused(runs), api_class(runs.view)), {})


def of_rest_framework_without_a_handler(runs):
    return type(
        "Unused", (graphql(runs), api_class(runs.view)), {"http_method_names": ["get"]}
    )


UNGUARDED = pytest.mark.parametrize(
    "make",
    [
        unused,
        pytest.param(of_rest_framework, marks=pytest.mark.drf),
        pytest.param(of_rest_framework_without_a_handler, marks=pytest.mark.drf),
    ],
)


@UNGUARDED
def test_a_required_key_that_protects_nothing_is_an_error(call, make):
    with pytest.raises(ImproperlyConfigured, match=r"Unused ran unprotected.*POST"):
        call(idempotent(required=True)(make(Runs())).as_view())


@UNGUARDED
def test_a_key_that_protects_nothing_is_logged_for_its_view(call, caplog, make):
    view = idempotent(make(Runs())).as_view()
    with caplog.at_level(logging.ERROR, "django_idempotency"):
        assert [call(view).content for _time in range(2)] == [b"run 1", b"run 2"]
    assert [
        "Unused: A request ran unprotected despite its key: the view responded without"
        in record.getMessage()
        for record in caplog.records
    ] == [True]


@pytest.mark.drf
def test_an_exception_before_the_handler_may_get_a_response(call):
    """As idemkit replays: around us while a project moves here from it."""

    def initial(self, request):
        raise LookupError

    handled = {
        "initial": initial,
        "handle_exception": lambda self, error: HttpResponse(type(error).__name__),
    }
    runs = Runs()
    view = idempotent(required=True)(
        type("Answers", (api_class(runs.view),), handled)
    ).as_view()
    assert (call(view).content, runs.count) == (b"LookupError", 0)


def test_a_method_without_a_handler_is_refused(call):
    assert call(idempotent(type("Empty", (View,), {})).as_view()).status_code == 405
