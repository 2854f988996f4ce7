from __future__ import annotations

import strawberry
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from strawberry.django.views import GraphQLView

from tests.compatibility.project import GraphQL, paid


@strawberry.type
class Query:
    nothing: str = ""


@strawberry.type
class Mutation:
    @strawberry.mutation
    def pay(self, reference: str) -> str:
        return paid(reference)


PROJECTS = {"strawberry-graphql": GraphQL("/graphql/")}
schema = strawberry.Schema(query=Query, mutation=Mutation)
urlpatterns = [path("graphql/", csrf_exempt(GraphQLView.as_view(schema=schema)))]
