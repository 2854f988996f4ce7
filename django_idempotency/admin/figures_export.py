"""What the charts of the dashboard show, by spans of time, as a CSV or JSON file."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse

from django_idempotency.admin.limits import page
from django_idempotency.admin.ranges import Chosen
from django_idempotency.admin.shards import database_of
from django_idempotency.stats import queries
from django_idempotency.stats.queries import Activity, Span

COLUMNS = [field.name for field in fields(Activity)]


def figures(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Return the file, for users who may see the dashboard. ``?format=`` is one of ``FORMATS``."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    written = FORMATS.get(request.GET.get("format", ""))
    if written is None:
        raise Http404
    chosen, using = Chosen.of(request), database_of(request)

    def write() -> HttpResponse:
        history = queries.history(chosen.range.seconds, step=chosen.range.step, view=chosen.view, using=using)
        return written(chosen, using, history)

    response = page(model_admin, request, write)
    if response.status_code == 200:
        name = f"idempotency-{chosen.range.name}.{request.GET['format']}"
        response.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


def _as_csv(_chosen: Chosen, _using: str, history: Sequence[Span]) -> HttpResponse:
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    writer = csv.writer(response)
    writer.writerow(["since", *COLUMNS])
    for span in history:
        writer.writerow([span.since.isoformat(), *asdict(span.activity).values()])
    return response


def _as_json(chosen: Chosen, using: str, history: Sequence[Span]) -> HttpResponse:
    spans = [{"since": span.since.isoformat(), **asdict(span.activity)} for span in history]
    asked = {"database": using, "view": chosen.view or None, "range": chosen.range.name}
    return JsonResponse({**asked, "seconds_in_span": chosen.range.step, "spans": spans})


FORMATS: Mapping[str, Callable[[Chosen, str, Sequence[Span]], HttpResponse]] = {"csv": _as_csv, "json": _as_json}
