"""Views that answer in ``dispatch()``, open a block of their own, or raise what a
middleware answers.
"""

from __future__ import annotations

from typing import Any

import graphene
import reversion
from django.contrib.auth.models import Group
from django.core.cache import cache
from django.http import HttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django_ratelimit.decorators import ratelimit
from graphene_django.views import GraphQLView
from reversion.models import Revision

from tests.compatibility.project import GraphQL, Project, paid, pay

reversion.register(Group)


class GrapheneQuery(graphene.ObjectType):
    nothing = graphene.String()


class Pay(graphene.Mutation):
    class Arguments:
        reference = graphene.String(required=True)

    paid = graphene.String()

    def mutate(self, _info: Any, reference: str) -> Pay:
        return Pay(paid=paid(reference))


class GrapheneMutation(graphene.ObjectType):
    pay = Pay.Field()


def pay_in_a_revision(request):
    with reversion.create_revision():
        return pay(request)


class Reversion(Project):
    path = "/revision/"

    def check(self):
        before = Revision.objects.count()
        for _ in range(2):
            self.send("r-revised", "revised")
        assert Revision.objects.count() == before + 1


@ratelimit(key="ip", rate="1/h", method="POST")
def limited(request):
    return pay(request)


def too_many(request, exception):
    return HttpResponse("Too many.", status=429)


class RateLimit(Project):
    def check(self):
        self.path = "/limited/"
        assert [
            self.send("r-limited", key).status_code for key in ("one", "two", "two")
        ] == [201, 429, 429]
        cache.clear()
        assert self.send("r-limited", "two").status_code == 201, "the key is free"
        assert self.effects("r-limited") == 2


PROJECTS = {
    "graphene-django": GraphQL("/graphene/", "{ paid }"),
    "django-reversion": Reversion(),
    "django-ratelimit": RateLimit(),
}
graphenes = GraphQLView.as_view(
    schema=graphene.Schema(query=GrapheneQuery, mutation=GrapheneMutation)
)
urlpatterns = [
    path("graphene/", csrf_exempt(graphenes)),
    path("revision/", csrf_exempt(pay_in_a_revision)),
    path("pay/", csrf_exempt(pay)),
    path("limited/", csrf_exempt(limited)),
]
