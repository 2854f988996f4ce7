"""Wrong use is refused at class creation, at decoration or by a check, with what to
write instead.
"""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import api_view, permission_classes
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Policy
from tests.support.callers import is_replay, post
from tests.support.views import Runs

pytestmark = pytest.mark.drf
refused = pytest.raises


def view(request):
    return HttpResponse()


def test_the_mixin_after_apiview_is_refused_at_class_creation():
    base = type("Base", (IdempotentMixin,), {})
    for bases in ((APIView, IdempotentMixin), (APIView, base)):
        with refused(ImproperlyConfigured, match="IdempotentMixin comes after APIView"):
            type("Charge", bases, {})
    type("Charge", (base, APIView), {})


@pytest.mark.parametrize("bases", [(IdempotentMixin, View), (View, IdempotentMixin)])
def test_the_mixin_on_a_plain_view_is_refused_at_class_creation(bases):
    with refused(
        ImproperlyConfigured,
        match=(
            "Charge is not one of REST framework's views: put @idempotent on the class"
        ),
    ):
        type("Charge", bases, {})


@pytest.mark.parametrize("wrong", [{"required": True}, None, "required", Policy])
def test_a_policy_that_is_none_is_refused(wrong):
    with refused(
        ImproperlyConfigured,
        match=r"idempotency_policy is .*; write idempotency_policy = Policy\(",
    ):
        type("Charge", (IdempotentMixin, APIView), {"idempotency_policy": wrong})
    with refused(ImproperlyConfigured, match="idempotency_policy is"):
        type("Charge", (IdempotentMixin, APIView), {}).as_view(idempotency_policy=wrong)


@pytest.mark.parametrize(
    "name", ["policy", "idempotency", "idempotent_policy", "idempotency_policies"]
)
def test_the_policy_under_a_name_that_nothing_reads_is_refused(name):
    with refused(
        ImproperlyConfigured,
        match=rf"Nothing reads Charge\.{name}: write idempotency_policy",
    ):
        type("Charge", (IdempotentMixin, APIView), {name: Policy(required=True)})


def test_a_class_may_keep_the_policies_of_its_actions():
    policy = Policy(required=True)
    type("Charge", (IdempotentMixin, APIView), {"policy": "a project's own"})
    type(
        "Charge",
        (IdempotentMixin, APIView),
        {"idempotency_refund": policy, "idempotency_policy": policy},
    )


def test_the_decorator_on_a_method_is_refused_where_it_is_written():
    with refused(
        ImproperlyConfigured,
        match=r"@method_decorator\(idempotent, name=\"post\"\).*REST.*IdempotentMixin",
    ):

        class Charge(View):
            @idempotent
            def post(self, request):
                return HttpResponse()


def test_an_entry_point_below_api_view_is_refused_before_the_view_runs():
    runs = Runs(lambda request: Response())
    inner = idempotent(scope="public")(lambda request: runs.view(request))
    wrong = api_view(["POST"])(permission_classes([])(inner))
    with refused(ImproperlyConfigured, match="above @api_view"):
        wrong(post())
    assert runs.count == 0


@pytest.mark.parametrize("name", ["post", "dispatch"])
def test_a_decorated_apiview_method_is_refused_before_it_runs(name):
    runs = Runs(lambda request: Response())
    charge = type(
        "Charge",
        (APIView,),
        {"post": lambda self, request: runs.view(request), "permission_classes": ()},
    )
    wrong = method_decorator(idempotent(scope="public"), name=name)(charge)
    with refused(ImproperlyConfigured, match="IdempotentMixin"):
        wrong.as_view()(post())
    assert runs.count == 0


def test_a_policy_is_given_by_name(call):
    with refused(TypeError, match=r"@idempotent\(policy=…\)"):
        idempotent(Policy())
    for wrong in (3, "lease", None):
        with refused(TypeError, match="idempotent"):
            idempotent(wrong)
    runs = Runs()
    protected = idempotent(policy=Policy(mode="lease"))(runs.view)
    assert is_replay([call(protected) for _ in range(2)][1])
    assert not runs.contexts[0].policy.is_atomic
    with refused(TypeError, match="policy="):
        idempotent(policy=Policy(), required=True)
    with refused(TypeError, match="policy="):
        idempotent(policy={"required": True})


SECOND = {
    "function": lambda: idempotent(idempotent(view)),
    "mixin": lambda: idempotent(type("Charge", (IdempotentMixin, APIView), {})),
    "mixin's view": lambda: idempotent(
        type("Charge", (IdempotentMixin, APIView), {}).as_view()
    ),
    "class": lambda: idempotent(idempotent(type("Charge", (View,), {}))),
}


@pytest.mark.parametrize("make", SECOND.values(), ids=SECOND)
def test_a_second_entry_point_is_refused_where_it_is_written(make):
    with refused(ImproperlyConfigured, match="already"):
        make()


def test_an_async_handler_of_rest_framework_is_refused(db):
    """REST framework has none, but packages that add them do: the entry point would end
    before the handler began.
    """

    class Charge(IdempotentMixin, APIView):
        idempotency_policy = Policy(scope="public")

        async def post(self, request):
            raise AssertionError("it ran")

    with refused(ImproperlyConfigured, match="Charge is async"):
        Charge.as_view()
    with refused(ImproperlyConfigured, match=r"Charge\.post is async"):
        Charge().dispatch(post())
    assert IdempotencyRecord.objects.count() == 0
