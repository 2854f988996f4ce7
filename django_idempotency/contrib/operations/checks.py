"""System checks of deferred operations, described in ``docs/deferred.md``."""

from __future__ import annotations

from django.urls import NoReverseMatch, reverse

from django_idempotency.contrib.operations.deferring import URL_NAME
from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.extending import Conf, of_project
from django_idempotency.extending.operators import Check, each


def lacks_url(_settings: Conf) -> bool:
    if not of_project("ROOT_URLCONF"):
        return False
    try:
        reverse(URL_NAME, args=["00000000-0000-0000-0000-000000000000"])
    except NoReverseMatch:
        return True
    return False


CHECKS = (
    Check(
        "E001",
        each("migrated", lambda database: database.lacks(DeferredOperation)),
        "The database {it} has records, but no table for deferred operations.",
        "Run manage.py migrate --database {it.using}.",
        database=True,
        deploy=True,
    ),
    Check(
        "W002",
        each("settings", lacks_url),
        f"No URL is named {URL_NAME!r}, so nothing can be deferred.",
        "Add path('operations/<uuid:id>/', OperationStatus.as_view(),"
        f" name={URL_NAME!r}) to the URLs.",
    ),
)
