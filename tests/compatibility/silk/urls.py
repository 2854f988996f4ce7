from __future__ import annotations

from django.contrib.auth.models import Group
from django.urls import include, path
from silk.models import Request, SQLQuery

from tests.compatibility.project import Project, pay


def count_and_pay(request):
    Group.objects.exists()  # silk records no INSERT
    return pay(request)


class Silk(Project):
    def take_bookings(self):
        found = Request.objects.filter(response__status_code=422).count()
        Request.objects.all().delete()
        return found

    def check(self):
        for _ in range(2):
            self.send("r-profiled", "profiled")
        recorded = Request.objects.order_by("start_time").filter(
            body__contains="r-profiled"
        )
        reads = [
            SQLQuery.objects.filter(request=each, query__contains="auth_group").count()
            for each in recorded
        ]
        assert reads == [1, 0], "one run, of which silk saw what it sees of any view"


PROJECTS = {"django-silk": Silk()}
urlpatterns = [
    path("silk/", include("silk.urls", namespace="silk")),
    path("pay/", count_and_pay),
]
