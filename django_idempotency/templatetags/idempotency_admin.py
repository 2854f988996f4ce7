"""``{% load idempotency_admin %}``: the alarms on the admin's index page, and a filter for the zone of a time."""

from __future__ import annotations

from typing import Any

from django import template
from django.template.context import Context

from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.connections import databases
from django_idempotency.values.printable import zone

register = template.Library()
register.filter("zone", zone)


@register.inclusion_tag("admin/django_idempotency/index_alarms.html", takes_context=True)
def idempotency_alarms(context: Context) -> dict[str, Any]:
    """Render a strip of alarms for each database with records, if the user may see records."""
    from django_idempotency.admin.alarms import alarms

    request = context["request"]
    if not request.user.has_perm("django_idempotency.view_idempotencyrecord"):
        return {}
    found = databases()
    strips = [
        {"alarms": alarms(alias), "database": alias, "database_query": f"database={alias}" if len(found) > 1 else ""}
        for alias in found
    ]
    return {"request": request, "opts": IdempotencyRecord._meta, "strips": strips, "several": len(found) > 1}
