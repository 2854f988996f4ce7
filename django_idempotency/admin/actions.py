"""The admin page on which an operator confirms an intervention, says why, and reads
what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import TextChoices
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_list_or_404
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_idempotency.admin.pages import database_of, query_of
from django_idempotency.maintenance.advice import advice
from django_idempotency.maintenance.decision_forms import INTERVENTIONS, Intervention
from django_idempotency.maintenance.decisions import Refusal, version
from django_idempotency.maintenance.reaper import have_it_watched

TEMPLATE = "admin/django_idempotency/idempotencyrecord/confirm.html"


def confirm(
    model_admin: Any, request: HttpRequest, form: Intervention, records: list[Any]
) -> TemplateResponse:
    """Return the page that says what is about to be done, to which records, and to
    which not.
    """
    objections = [(record, form.objection(record, request.user)) for record in records]
    for record, why in objections:
        if why is Refusal.LAPSED:
            have_it_watched(record)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": form.title,
        "opts": model_admin.opts,
        "rows": [
            (record, version(record), advice(record).what, why and why.label)
            for record, why in objections
        ],
        "possible": any(why is None for _record, why in objections),
        "form": form,
        "media": model_admin.media,
        "filters": _filters(request),
        "database": database_of(request),
        "database_query": query_of(request),
        "list": _list(model_admin, request),
    }
    return TemplateResponse(request, TEMPLATE, context)


def intervene(model_admin: Any, request: HttpRequest, act: str) -> HttpResponse:
    """Ask for confirmation on GET, for the record ``?id=…``; on POST, do what was
    confirmed.
    """
    if act not in INTERVENTIONS:
        raise Http404
    intervention = INTERVENTIONS[act]
    if not (
        model_admin.has_view_permission(request)
        and request.user.has_perm(intervention.act.permission)
    ):
        raise PermissionDenied
    seen = dict(choice.partition(" ")[::2] for choice in request.POST.getlist("record"))
    ids = _ids(seen or request.GET.getlist("id"))
    if intervention.is_of_one and len(ids) > 1:
        raise Http404
    found = model_admin.get_queryset(request).filter(pk__in=ids)
    form = intervention(
        request.POST if request.method == "POST" else None,
        record=found.first() if intervention.is_of_one else None,
    )
    if not form.is_valid() or not seen:
        return confirm(model_admin, request, form, get_list_or_404(found))
    terms = {**form.terms(), "using": database_of(request), "by": request.user}
    outcomes = {
        id: form.do(id, as_seen=as_seen, **terms)
        for id, as_seen in zip(ids, seen.values(), strict=True)
    }
    _tell(model_admin, request, form, outcomes)
    return HttpResponseRedirect(_list(model_admin, request))


def _ids(texts: Iterable[str]) -> list[UUID]:
    try:
        return [UUID(text) for text in texts]
    except ValueError:
        raise Http404 from None


def _tell(
    model_admin: Any,
    request: HttpRequest,
    form: Intervention,
    outcomes: Mapping[UUID, Any],
) -> None:
    done = sum(not isinstance(outcome, TextChoices) for outcome in outcomes.values())
    if done:
        text = ngettext(
            "%(title)s: done for one record.",
            "%(title)s: done for %(count)d records.",
            done,
        )
        messages.success(request, text % {"title": form.title, "count": done})
    names = {
        record.pk: str(record)
        for record in model_admin.get_queryset(request).filter(pk__in=[*outcomes])
    }
    for id, outcome in outcomes.items():
        if isinstance(outcome, TextChoices):
            refused = _("{title}: nothing was done to {record}. {why}")
            record = format_html("<bdi>{}</bdi>", names.get(id, id))
            messages.warning(
                request,
                format_html(
                    refused, title=form.title, record=record, why=outcome.label
                ),
            )


def _list(model_admin: Any, request: HttpRequest) -> str:
    """Return the URL of the list from which the records were chosen."""
    url = reverse(
        "admin:django_idempotency_idempotencyrecord_changelist",
        current_app=model_admin.admin_site.name,
    )
    return "?".join(filter(None, (url, _filters(request))))


def _filters(request: HttpRequest) -> str:
    if "filters" in request.POST:
        return request.POST["filters"]
    if "id" in request.GET:
        return request.GET.get("_changelist_filters", query_of(request))
    return request.GET.urlencode()
