"""The records in the admin: what is stuck and since when, what its client got, and what
an operator can do about it.

No form edits a record's fields. What an operator decides goes through ``maintenance``,
after a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import ChangeList
from django.db import connections
from django.db.models import Q
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_idempotency import signals
from django_idempotency.admin import pages
from django_idempotency.admin.actions import confirm, intervene
from django_idempotency.admin.alarms import alarms
from django_idempotency.admin.lists import (
    DatabaseFilter,
    Finder,
    RecordList,
    Records,
    SituationFilter,
    situation_of,
    term_of,
)
from django_idempotency.admin.pages import (
    RESPONSE_BODY,
    database_of,
    query_of,
    readable,
)
from django_idempotency.maintenance.advice import (
    advice,
    seconds_of,
    shown_reason,
    standing_of,
    timeline,
)
from django_idempotency.maintenance.decision_forms import INTERVENTIONS
from django_idempotency.maintenance.decisions import Act, Refusal
from django_idempotency.maintenance.find import MOST
from django_idempotency.maintenance.formatting import age, amount
from django_idempotency.maintenance.history import VIEWED, write_entry
from django_idempotency.maintenance.records import operation_of
from django_idempotency.maintenance.sessions import session_of
from django_idempotency.models import DatabaseNow, IdempotencyRecord, RowLocked
from django_idempotency.reporting.events import send
from django_idempotency.stores import stored_response
from django_idempotency.values.printable import column, in_zone, printable

TEMPLATES = "admin/django_idempotency/idempotencyrecord"
SAYS_NOTHING_WITHOUT = {
    "token": "token",
    "fingerprint_hex": "fingerprint",
    "session": "locked",
    "response_status": "response_status",
    "headers": "response_status",
    "body": "response_status",
}


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[IdempotencyRecord]
else:
    ModelAdmin = admin.ModelAdmin


def _intervening(act: Act) -> Any:
    """Return the admin action that leads to the confirmation."""
    intervention = INTERVENTIONS[act]

    @admin.action(description=intervention.title)
    def action(
        model_admin: Any, request: HttpRequest, queryset: Records
    ) -> HttpResponse | None:
        # Only the records that were ticked, never all pages: operators are responsible
        # for what they have seen.
        records = list(
            queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME))
        )
        if not records:
            messages.warning(
                request, gettext("Your selection is no longer in this list.")
            )
            return None
        if intervention.is_of_one and len(records) > 1:
            messages.warning(
                request, gettext("Choose one record: each has its own response.")
            )
            return None
        return confirm(model_admin, request, intervention(), records)

    action.__name__ = f"{act}_records"
    return action


def _field(
    name: Any, show: Callable[[Any], Any], *, ordering: str | None = None
) -> Any:
    @admin.display(description=name, ordering=ordering)
    def shown(_model_admin: Any, record: Any) -> Any:
        return show(record)

    return shown


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(pages.ReadOnly, ModelAdmin):
    list_display = (
        "shown_key",
        "badge",
        "since",
        "shown_reason",
        "attempts",
        "request",
        "shown_scope",
    )
    list_filter = (DatabaseFilter, SituationFilter, Finder, "mode")
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("key",)
    search_help_text = _(
        "A whole key, as the client sent it, or a record’s id, whatever its situation;"
        " or the beginning of a key, scope or path in this list."
    )
    actions = [_intervening(act) for act in Act]
    change_list_template = f"{TEMPLATES}/change_list.html"
    change_form_template = f"{TEMPLATES}/change_form.html"
    fieldsets = (
        (
            None,
            {
                "fields": (
                    "whole_key",
                    "shown_scope",
                    "badge",
                    "session",
                    "what",
                    "by_itself",
                    "safe",
                )
            },
        ),
        (_("Timeline"), {"fields": ("events",)}),
        (_("Request"), {"fields": ("method", "shown_path", "fingerprint_hex", "id")}),
        (
            _("Claim"),
            {"fields": ("mode", "shown_hold", "attempts", "token")},
        ),
        (_("Response"), {"fields": ("response_status", "headers", "body")}),
    )

    class Media:
        css = {"all": ("django_idempotency/admin.css",)}

    # --- What is read, and how --------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> Records:
        """Read from the database that holds the records, never from a replica, which
        would show stuck ones too late.
        """
        rows = super().get_queryset(request).using(database_of(request))
        return rows.annotate(now=DatabaseNow(), locked=RowLocked()).defer(
            "response_body"
        )

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # Otherwise, users who may not see these columns could find out their values bit
        # by bit.
        hidden = lookup.startswith(
            ("response_body", "response_headers", "token", "fingerprint")
        )
        return not hidden and super().lookup_allowed(lookup, value, request)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return (situation_of(request).ordering,)

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the columns that matter in the situation or, for a search, in any."""
        if term_of(request.GET.get("q", "")):
            return self.list_display
        return ("shown_key", *situation_of(request).columns, "request", "shown_scope")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return RecordList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        searched = bool(term_of(request.GET.get("q", "")))
        context = {
            "situation": None if searched else situation_of(request),
            "most": amount(MOST),
            "database_query": query_of(request),
            "alarms": alarms(database_of(request)),
            "links": [
                (f"admin:{page.name}", page.title)
                for page in pages.registered
                if page.title
            ],
        }
        return super().changelist_view(request, context | (extra_context or {}))

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Records, bool]:
        """Search by primary key: one record's, or the range that a raw key maps to.
        Never look through the table.

        If that finds nothing, return what begins with the term in the list that is
        shown.
        """
        term = term_of(search_term)
        if not term:
            return queryset, False
        if (found := queryset.with_key(term)).exists():
            return found, False
        with suppress(ValueError):  # it is no id
            if (found := queryset.with_id(UUID(term))).exists():
                return found, False
        begins = (
            Q(key__startswith=term)
            | Q(scope__startswith=term)
            | Q(path__startswith=term)
        )
        return situation_of(request).first(queryset).filter(begins), False

    # --- What is shown ----------------------------------------------------------------

    shown_created_at = column("created_at", _("created at"))

    badge = _field(_("status"), lambda record: _badge(record), ordering="status")
    since = _field(_("since"), lambda record: _since(record), ordering="updated_at")
    shown_reason = _field(_("reason"), lambda record: _clamped(shown_reason(record)))
    request = _field(
        _("request"),
        lambda record: _clamped(f"{record.method} {record.path}"),
        ordering="path",
    )
    shown_key = _field(_("key"), lambda record: _clamped(record.key), ordering="key")
    shown_scope = _field(
        _("scope"), lambda record: _clamped(record.scope), ordering="scope"
    )
    shown_path = _field(_("path"), lambda record: _apart(record.path))
    whole_key = _field(_("key"), lambda record: _apart(record.key))
    fingerprint_hex = _field(
        _("fingerprint"), lambda record: bytes(record.fingerprint).hex()
    )
    session = _field(
        _("row locked by"),
        lambda record: session_of(record) or _("a transaction that has just ended"),
    )
    shown_hold = _field(
        _("hold on crash"), lambda record: _("yes") if record.hold_on_crash else _("no")
    )
    what = _field(_("what it is"), lambda record: advice(record).what)
    by_itself = _field(
        _("what happens by itself"), lambda record: advice(record).by_itself
    )
    safe = _field(_("safe to do now"), lambda record: advice(record).safe)

    @admin.display(description=_("what happened"))
    def events(self, record: Any) -> SafeString:
        context = {"events": timeline(record), "now": record.now}
        return render_to_string(f"{TEMPLATES}/timeline.html", context)

    @admin.display(description=_("response headers"))
    def headers(self, record: IdempotencyRecord) -> SafeString:
        response = stored_response(record)
        headers = (
            [(printable(name), printable(value)) for name, value in response.headers]
            if response
            else []
        )
        return render_to_string(f"{TEMPLATES}/headers.html", {"headers": headers})

    @admin.display(description=_("response body"))
    def body(self, record: IdempotencyRecord) -> SafeString:
        shown, response = None, stored_response(record)
        if response is not None and response.body is not None:
            headers = {name.lower(): value for name, value in response.headers}
            shown = readable(response.body, headers.get("content-type", ""))
        return render_to_string(f"{TEMPLATES}/body.html", {"shown": shown})

    def get_fieldsets(
        self, request: HttpRequest, obj: IdempotencyRecord | None = None
    ) -> Any:
        """Leave out the fields that tell this user nothing about this record."""
        left_out = {
            name
            for name, column in SAYS_NOTHING_WITHOUT.items()
            if not getattr(obj, column, None)
        }
        if not request.user.has_perm(RESPONSE_BODY):
            left_out |= {"headers", "body", "token", "fingerprint_hex"}
        shown = [
            (
                title,
                {
                    **options,
                    "fields": tuple(
                        name for name in options["fields"] if name not in left_out
                    ),
                },
            )
            for title, options in self.fieldsets
        ]
        return [(title, options) for title, options in shown if options["fields"]]

    # --- What can be done -------------------------------------------------------------

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Leave out the interventions that this user may not make."""
        forbidden = {
            f"{act}_records" for act in Act if not request.user.has_perm(act.permission)
        }
        # since Django 6.1
        where: Any = (
            {} if action_location is None else {"action_location": action_location}
        )
        found = super().get_actions(request, **where)
        return {name: action for name, action in found.items() if name not in forbidden}

    def get_urls(self) -> list[URLPattern]:
        return [
            *(
                path(page.route, self._page(page.view), name=page.name)
                for page in pages.registered
            ),
            path(
                "intervene/<str:act>/",
                self._page(intervene),
                name="django_idempotency_intervene",
            ),
            *super().get_urls(),
        ]

    def _page(self, view: Callable[..., HttpResponse]) -> Any:
        """Return ``view`` for staff, outside the transaction of ``ATOMIC_REQUESTS``,
        because it has its own.
        """
        page: Any = self.admin_site.admin_view(partial(view, self))
        page._non_atomic_requests = set(connections)
        return page

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        record: Any = self.get_object(request, object_id)
        possible = [
            intervention()
            for intervention in INTERVENTIONS.values()
            if record is not None
            and request.user.has_perm(intervention.act.permission)
            and intervention.objection(record, request.user)
            in (None, Refusal.LAPSED, Refusal.BUSY)
        ]
        context = {"interventions": possible, "database_query": query_of(request)}
        return super().change_view(
            request, object_id, form_url, context | (extra_context or {})
        )

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **options: Any
    ) -> HttpResponse:
        """Write a history entry before a body is shown, so that nobody sees one without
        an entry.
        """
        record = context.get("original")
        if (
            record is not None
            and request.user.has_perm(RESPONSE_BODY)
            and record.response_body is not None
        ):
            write_entry(record, request.user, VIEWED)
            send(signals.response_viewed, operation_of(record), user=request.user)
        return super().render_change_form(request, context, *args, **options)


# --- Of one record --------------------------------------------------------------------


def _clamped(text: str) -> SafeString:
    """Show the first lines of a long text; all of it on hover, and on the record's
    page.
    """
    text = printable(text)
    return format_html(
        '<bdi class="idempotency-clamped" title="{}">{}</bdi>', text, text
    )


def _apart(text: str) -> SafeString:
    """Show a text whose direction may differ from that of the page."""
    return format_html("<bdi>{}</bdi>", printable(text))


def _badge(record: Any) -> SafeString:
    stands = standing_of(record)
    text = ", ".join(
        str(part) for part in (stands.label, record.response_status) if part is not None
    )
    return format_html(
        '<span class="idempotency-badge {}">{}</span>', stands.name.lower(), text
    )


def _since(record: Any) -> SafeString:
    """Return how long a record has been as it is; the time itself on hover."""
    moment = record.locked_at or record.updated_at
    at = in_zone(moment).isoformat(timespec="seconds")
    return format_html(
        '<time datetime="{at}" title="{at}">{ago}</time>',
        at=at,
        ago=age(seconds_of(record)),
    )
