"""The page that derives a record's child keys, to look them up at the services that its view has called."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.admin.pages import PARAMETER, database_of, page, query_of
from django_idempotency.engine.digests import child_key
from django_idempotency.maintenance.records import operation_of

TEMPLATE = "admin/django_idempotency/idempotencyrecord/child_keys.html"
RESPONSE_BODY = "django_idempotency.view_response_idempotencyrecord"


class ChildKeyForm(forms.Form):
    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=200,
        strip=False,
        help_text=gettext_lazy("What the view passes to child_key(), such as “bank”."),
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )


def child_keys(model_admin: Any, request: HttpRequest, object_id: str) -> HttpResponse:
    """Derive a child key, for users who may see stored responses: elsewhere, it stands for the operation."""
    if not (model_admin.has_view_permission(request) and request.user.has_perm(RESPONSE_BODY)):
        raise PermissionDenied
    return page(model_admin, request, lambda: _page(model_admin, request, object_id))


def _page(model_admin: Any, request: HttpRequest, object_id: str) -> TemplateResponse:
    record: Any = model_admin.get_object(request, object_id)
    if record is None:
        raise Http404
    request.current_app = model_admin.admin_site.name
    form = ChildKeyForm(request.GET if "name" in request.GET else None)
    derived = _derived(record, form.cleaned_data["name"]) if form.is_valid() else None
    context = {
        **model_admin.admin_site.each_context(request),
        "title": _("Child keys"),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "record": record,
        "form": form,
        "derived": derived,
        "derivable": bool(record.fingerprint) and derived != "",
        "parameter": PARAMETER,
        "database": database_of(request),
        "database_query": query_of(request),
    }
    return TemplateResponse(request, TEMPLATE, context)


def _derived(record: Any, name: str) -> str:
    """Return the child key, or an empty string if the digest key that it was derived by is no longer there."""
    if not record.fingerprint:
        return ""
    try:
        return child_key(operation_of(record), name)
    except KeyError:
        return ""
