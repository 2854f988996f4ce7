from __future__ import annotations

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group
from django.urls import path
from django_tenants.utils import get_tenant_model, schema_context

from tests.compatibility.project import REFUSED, Project, pay
from tests.compatibility.tenants.models import Domain

ACME, UMBRA = "acme", "umbra"


def sign_in(get_response):
    def middleware(request):
        request.user = get_user_model().objects.get(username="carol")
        return get_response(request)

    return middleware


class Tenants(Project):
    def begin(self):
        for name in (ACME, UMBRA):
            shop = get_tenant_model().objects.create(schema_name=name)
            Domain.objects.create(
                tenant=shop, domain=f"{name}.example", is_primary=True
            )
            with schema_context(name):
                get_user_model().objects.create_user("carol")

    def headers(self):
        return {"Host": f"{ACME}.example"}

    def effects(self, reference, tenant=ACME):
        with schema_context(tenant):
            return Group.objects.filter(name__startswith=reference).count()

    def take_bookings(self):
        with schema_context(ACME):
            return Group.objects.filter(name__startswith=REFUSED).delete()[0]

    def check(self):
        hosts = [f"{name}.example" for name in (ACME, UMBRA)] * 2
        paid = [self.send("r-both", "both", Host=host) for host in hosts]
        assert [answer.headers.get("Idempotent-Replayed") for answer in paid] == [
            None,
            None,
            "true",
            "true",
        ]
        assert [answer.content for answer in paid[:2]] == [
            answer.content for answer in paid[2:]
        ]
        assert [self.effects("r-both", tenant) for tenant in (ACME, UMBRA)] == [1, 1]


WHERE = (
    "in each tenant's schema"
    if "django_idempotency" in settings.TENANT_APPS
    else "in one schema for all"
)
PROJECTS = {f"django-tenants, records {WHERE}": Tenants()}
urlpatterns = [path("pay/", pay)]
