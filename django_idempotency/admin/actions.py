"""The admin page on which an operator confirms an intervention, says why, and reads what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar
from uuid import UUID

from django import forms
from django.contrib import messages
from django.contrib.admin import widgets
from django.core.exceptions import PermissionDenied
from django.core.validators import RegexValidator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.admin.pages import database_of, query_of
from django_idempotency.conf import conf
from django_idempotency.http.responses import WITHOUT_BODY
from django_idempotency.maintenance.advice import advice
from django_idempotency.maintenance.decisions import (
    Act,
    Done,
    Refusal,
    Refused,
    allow_retry,
    extend,
    fail,
    objection,
    resolve,
    version,
)
from django_idempotency.maintenance.given_responses import may_be_given
from django_idempotency.maintenance.reaper import have_it_watched
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.scopes import is_own

TEMPLATE = "admin/django_idempotency/idempotencyrecord/confirm.html"
CONTENT_TYPE = RegexValidator(
    re.compile(r"^[\w.+-]+/[\w.+-]+(?: *; *[\w.+-]+=[\w.+-]+)*\Z", re.ASCII),
    gettext_lazy("Enter a valid content type."),
)
SECONDS_A_WEEK = 7 * 24 * 60 * 60


# --- What can be done ------------------------------------------------------------------------------------------------


class Decision(forms.Form):
    """What an operator can decide, and the form for it. ``asks`` is what the page asks of an operator."""

    act: ClassVar[Any]
    title: ClassVar[Any]
    asks: ClassVar[Any]
    button: ClassVar[Any]
    field_order: tuple[str, ...] = ()

    note = forms.CharField(
        label=gettext_lazy("Note"),
        required=False,
        max_length=200,
        widget=widgets.AdminTextInputWidget,
        help_text=gettext_lazy("The reason, for the history of the record."),
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fields["note"].required = "note" in conf().decisions


class Intervention(Decision):
    """A decision about a record."""

    do: ClassVar[Callable[..., Done | Refused]]

    def terms(self) -> dict[str, Any]:
        """Return the arguments of ``do`` that were entered."""
        return self.cleaned_data


class AllowRetry(Intervention):
    act = Act.ALLOW_RETRY
    title = gettext_lazy("Allow a retry")
    asks = gettext_lazy("The next request with the key runs again. Make sure that the operation did not take place.")
    button = gettext_lazy("Allow retry")
    do = staticmethod(allow_retry)


class Fail(Intervention):
    act = Act.FAIL
    title = gettext_lazy("Mark as failed")
    asks = gettext_lazy("The key never runs again: every retry gets this failure as its response.")
    button = gettext_lazy("Mark as failed")
    do = staticmethod(fail)

    status = forms.IntegerField(
        label=gettext_lazy("Status"),
        min_value=400,
        max_value=599,
        initial=410,
        help_text=gettext_lazy("The status of the response that every retry gets from now on: an error, 400 to 599."),
    )
    detail = forms.CharField(
        label=gettext_lazy("Detail"),
        required=False,
        max_length=1000,
        widget=widgets.AdminTextInputWidget,
        help_text=gettext_lazy("For the client: part of the problem response."),
    )
    field_order = ("status", "detail", "note")


class Resolve(Intervention):
    act = Act.RESOLVE
    title = gettext_lazy("Resolve with a response")
    asks = gettext_lazy("The operation took place: every retry gets the response that you enter here.")
    button = gettext_lazy("Resolve")
    do = staticmethod(resolve)

    status = forms.IntegerField(
        label=gettext_lazy("Status"),
        min_value=200,
        max_value=599,
        initial=200,
        help_text=gettext_lazy("The status of the response that every retry gets from now on."),
    )
    content_type = forms.CharField(
        label=gettext_lazy("Content type"),
        max_length=200,
        initial="application/json",
        validators=[CONTENT_TYPE],
        widget=widgets.AdminTextInputWidget,
    )
    body = forms.CharField(
        label=gettext_lazy("Body"),
        required=False,
        strip=False,
        max_length=100_000,
        widget=widgets.AdminTextareaWidget,
    )
    field_order = ("status", "content_type", "body", "note")

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean() or self.cleaned_data
        if cleaned.get("body") and cleaned.get("status") in WITHOUT_BODY:
            self.add_error("body", _("A response with status %(status)s has no body.") % cleaned)
        elif cleaned.get("body") and "content_type" in cleaned and not may_be_given(cleaned["content_type"]):
            self.add_error("content_type", _("A response of this type can't be entered by hand here."))
        elif cleaned.get("body") and "json" in cleaned.get("content_type", ""):
            try:
                json.loads(cleaned["body"])
            except (ValueError, RecursionError) as error:
                self.add_error("body", _("This is not JSON: %(error)s") % {"error": error})
        return cleaned

    def terms(self) -> dict[str, Any]:
        given = self.cleaned_data
        # Browsers send line breaks with carriage returns that were not typed.
        body = given["body"].replace("\r\n", "\n").encode()
        response = StoredResponse(given["status"], (("Content-Type", given["content_type"]),), body)
        return {"response": response, "note": given["note"]}


class Extend(Intervention):
    act = Act.EXTEND
    title = gettext_lazy("Extend lease")
    asks = gettext_lazy("No retry takes over before the lease ends. Its owner keeps its claim.")
    button = gettext_lazy("Extend")
    do = staticmethod(extend)

    seconds = forms.IntegerField(
        label=gettext_lazy("Seconds"),
        min_value=1,
        max_value=SECONDS_A_WEEK,
        initial=300,
        help_text=gettext_lazy("Counted from now. A lease is never shortened."),
    )
    field_order = ("seconds", "note")


INTERVENTIONS: dict[Act, type[Intervention]] = {each.act: each for each in (AllowRetry, Fail, Resolve, Extend)}


# --- The page --------------------------------------------------------------------------------------------------------


def confirm(model_admin: Any, request: HttpRequest, form: Intervention, records: Iterable[Any]) -> TemplateResponse:
    """Return the page that says what is about to be done, to which records, and to which not."""
    records = list(records)
    objections = [(record, _objection(request, record, form.act)) for record in records]
    for record, why in objections:
        if why is Refusal.LAPSED:
            have_it_watched(record)
    context = {
        **model_admin.admin_site.each_context(request),
        "title": form.title,
        "opts": model_admin.opts,
        "rows": [(record, version(record), advice(record).what, why and why.label) for record, why in objections],
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
    """Ask for confirmation on GET, for the record ``?id=…``; on POST, do what was confirmed."""
    if act not in INTERVENTIONS:
        raise Http404
    intervention = INTERVENTIONS[Act(act)]
    if not (model_admin.has_view_permission(request) and request.user.has_perm(intervention.act.permission)):
        raise PermissionDenied
    seen = dict(choice.partition(" ")[::2] for choice in request.POST.getlist("record"))
    form = intervention(request.POST if request.method == "POST" else None)
    if not form.is_valid() or not seen:
        ids = _ids(seen or request.GET.getlist("id"))
        return confirm(model_admin, request, form, _records(model_admin, request, ids))
    if form.act == Act.RESOLVE and len(seen) > 1:
        raise Http404
    terms = {**form.terms(), "using": database_of(request), "by": request.user}
    outcomes = {
        id: form.do(id, as_seen=as_seen, **terms) for id, as_seen in zip(_ids(seen), seen.values(), strict=True)
    }
    _tell(model_admin, request, form, outcomes)
    return HttpResponseRedirect(_list(model_admin, request))


def _objection(request: HttpRequest, record: Any, act: Act) -> Refusal | None:
    if is_own(record.scope, request.user):
        return Refusal.OWN_KEY
    why = objection(record, act, record.now)
    return Refusal.BUSY if why is None and record.locked else why


def _ids(texts: Iterable[str]) -> list[UUID]:
    try:
        return [UUID(text) for text in texts]
    except ValueError:
        raise Http404 from None


def _records(model_admin: Any, request: HttpRequest, ids: list[UUID]) -> list[Any]:
    found = list(model_admin.get_queryset(request).filter(pk__in=ids))
    if not found:
        raise Http404
    return found


def _tell(model_admin: Any, request: HttpRequest, form: Intervention, outcomes: Mapping[UUID, Done | Refused]) -> None:
    done = sum(isinstance(outcome, Done) for outcome in outcomes.values())
    if done:
        text = ngettext("%(title)s: done for one record.", "%(title)s: done for %(count)d records.", done)
        messages.success(request, text % {"title": form.title, "count": done})
    names = {record.pk: str(record) for record in model_admin.get_queryset(request).filter(pk__in=[*outcomes])}
    for id, outcome in outcomes.items():
        if isinstance(outcome, Refused):
            refused = _("{title}: nothing was done to {record}. {why}")
            record = format_html("<bdi>{}</bdi>", names.get(id, id))
            messages.warning(request, format_html(refused, title=form.title, record=record, why=outcome.why.label))


def _list(model_admin: Any, request: HttpRequest) -> str:
    """Return the URL of the list from which the records were chosen."""
    url = reverse("admin:django_idempotency_idempotencyrecord_changelist", current_app=model_admin.admin_site.name)
    return "?".join(filter(None, (url, _filters(request))))


def _filters(request: HttpRequest) -> str:
    if "filters" in request.POST:
        return request.POST["filters"]
    if "id" in request.GET:
        return request.GET.get("_changelist_filters", query_of(request))
    return request.GET.urlencode()
