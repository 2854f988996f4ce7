"""The records in the admin: what is stuck and since when, what a client was told, and what an operator can do about it.

No form edits a record's fields. What an operator decides goes through ``maintenance``, after a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
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
from django.utils.text import format_lazy
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_idempotency import signals
from django_idempotency.admin.actions import INTERVENTIONS, confirm, intervene
from django_idempotency.admin.alarms import alarms
from django_idempotency.admin.changelist import RecordList
from django_idempotency.admin.child_keys import RESPONSE_BODY, child_keys
from django_idempotency.admin.dashboard import dashboard
from django_idempotency.admin.figures_export import figures
from django_idempotency.admin.filters import (
    DatabaseFilter,
    MethodFilter,
    PathFilter,
    SituationFilter,
    TimeFilter,
    situation_of,
    term_of,
)
from django_idempotency.admin.limits import page
from django_idempotency.admin.lists import MOST, Records
from django_idempotency.admin.locks import in_flight_by_lock
from django_idempotency.admin.outbox import outbox_events
from django_idempotency.admin.previews import readable
from django_idempotency.admin.shards import database_of, query_of
from django_idempotency.log_ids import ids_behind, shown_id
from django_idempotency.maintenance.advice import advice
from django_idempotency.maintenance.interventions import Act, Refusal, objection
from django_idempotency.maintenance.log_entries import VIEWED, entries_of_life, told_entry, write_entry
from django_idempotency.maintenance.owners import told_owner
from django_idempotency.maintenance.reasons import told_reason
from django_idempotency.maintenance.records import operation_of
from django_idempotency.maintenance.timeline import Event, in_order, timeline
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, RowLocked, Status
from django_idempotency.moments import column, in_zone
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Mode
from django_idempotency.printable import printable
from django_idempotency.scopes import is_own
from django_idempotency.stats.formatting import age, amount
from django_idempotency.stores.codec import decoded, is_encrypted, life_of
from django_idempotency.traces import Trace

TEMPLATES = "admin/django_idempotency/idempotencyrecord"
SAYS_NOTHING_WITHOUT = {
    **{"owner": "locked_at", "token": "token", "fingerprint_hex": "fingerprint", "shown_trace": "trace"},
    **dict.fromkeys(("response_status", "headers", "body"), "response_status"),
}


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[IdempotencyRecord]
else:
    ModelAdmin = admin.ModelAdmin


def _intervening(act: Act) -> Any:
    """Return the admin action that leads to the confirmation."""
    title: Any = INTERVENTIONS[act].title

    @admin.action(description=title, permissions=[str(act)])
    def action(model_admin: Any, request: HttpRequest, queryset: Records) -> HttpResponse | None:
        # Only the records that were ticked, never all pages: operators are responsible for what they have seen.
        records = list(queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)))
        if not records:
            messages.warning(request, gettext("Your selection is no longer in this list."))
            return None
        if act == Act.RESOLVE and len(records) > 1:
            messages.warning(request, gettext("Choose one record: each has its own response."))
            return None
        return confirm(model_admin, request, act, records)

    action.__name__ = f"{act}_records"
    return action


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ModelAdmin):
    list_display = ("shown_key", "badge", "undecided_for", "shown_reason", "shown_attempts", "request", "shown_scope")
    list_filter = (DatabaseFilter, SituationFilter, TimeFilter, PathFilter, MethodFilter, "mode")
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("key",)
    search_help_text = _(
        "A whole key, as the client sent it, or a record’s id, whatever its situation; or the beginning of a key, "
        "scope or path in this list."
    )
    actions = [_intervening(act) for act in INTERVENTIONS]
    change_list_template = f"{TEMPLATES}/change_list.html"
    change_form_template = f"{TEMPLATES}/change_form.html"
    fieldsets = (
        (None, {"fields": ("copyable_key", "shown_scope", "badge", "what", "by_itself", "safe", "owner")}),
        (_("Timeline"), {"fields": ("events",)}),
        (_("Request"), {"fields": ("method", "shown_path", "fingerprint_hex", "copyable_id", "copyable_log_id")}),
        (_("Claim"), {"fields": ("mode", "hold_on_crash", "attempts", "shown_trace", "token")}),
        (_("Response"), {"fields": ("response_status", "headers", "body")}),
        (
            _("Times"),
            {
                "classes": ("collapse",),
                "fields": (
                    *("shown_created_at", "shown_updated_at", "shown_locked_at", "shown_locked_until"),
                    *("shown_expires_at", "shown_purge_at", "replays", "shown_last_replayed_at"),
                ),
            },
        ),
    )

    class Media:
        css = {"all": ("django_idempotency/admin.css",)}
        js = ("django_idempotency/copy.js",)

    # --- What is read, and how -----------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> Records:
        """Read from the database that holds the records, never from a replica, which would show stuck ones too late."""
        rows = super().get_queryset(request).using(database_of(request))
        return rows.annotate(now=DatabaseNow(), locked=RowLocked()).defer("response_body")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # Otherwise, users who may not see these columns could find out their values bit by bit.
        hidden = lookup.startswith(("response_body", "response_headers", "token", "fingerprint"))
        return not hidden and super().lookup_allowed(lookup, value, request)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return situation_of(request).ordering

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the columns that matter in the situation or, for a search, in any."""
        if term_of(request.GET.get("q", "")):
            return self.list_display
        return ("shown_key", *situation_of(request).columns, "request", "shown_scope")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return RecordList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        searched = bool(term_of(request.GET.get("q", "")))
        context = {
            "situation": None if searched else situation_of(request),
            "most": amount(MOST),
            "database_query": query_of(request),
            "alarms": alarms(database_of(request)),
            "by_lock": in_flight_by_lock(request),
        }
        show = super().changelist_view
        return page(self, request, lambda: show(request, context | (extra_context or {})))

    def get_search_results(self, request: HttpRequest, queryset: Records, search_term: str) -> tuple[Records, bool]:
        """Search by primary key: one record's, or the range that a raw key maps to. Never look through the table.

        If that finds nothing, return what begins with the term in the list that is shown.
        """
        term = term_of(search_term)
        if not term:
            return queryset, False
        found = queryset & IdempotencyRecord.objects.using(queryset.db).with_key(term)
        if found.exists():
            return found, False
        id = _as_id(term)
        if id is not None and (found := queryset.filter(pk__in=ids_behind(id))).exists():
            return found, False
        begins = Q(key__startswith=term) | Q(scope__startswith=term) | Q(path__startswith=term)
        return situation_of(request).first(queryset).filter(begins), False

    # --- What is shown -------------------------------------------------------------------------------------------

    shown_created_at = column("created_at", _("created at"))
    shown_updated_at = column("updated_at", _("updated at"))
    shown_locked_at = column("locked_at", _("locked at"))
    shown_locked_until = column("locked_until", _("locked until"))
    shown_expires_at = column("expires_at", _("expires at"))
    shown_purge_at = column("purge_at", _("purge at"))
    shown_last_replayed_at = column("last_replayed_at", _("last replayed at"))

    @admin.display(description=_("status"), ordering="status")
    def badge(self, record: Any) -> SafeString:
        name, text = _standing(record)
        return format_html('<span class="idempotency-badge {}">{}</span>', name, text)

    def summary(self, record: Any) -> list[str]:
        """Return what an operator has to know before a decision: since when, after how many attempts, and why."""
        if record.status in LIVE:
            since = gettext("in flight for {age}").format(age=self.claim(record))
        else:
            text = gettext("on hold for {age}") if record.on_hold else gettext("ended {age} ago")
            since = text.format(age=_ago(record.now - record.updated_at))
        attempts = ngettext("%(count)d attempt", "%(count)d attempts", record.attempts) % {"count": record.attempts}
        return [text for text in (since, attempts, told_reason(record)) if text]

    @admin.display(description=_("attempts"), ordering="attempts")
    def shown_attempts(self, record: Any) -> SafeString:
        return format_html("{} {}", _column(_("attempts")), record.attempts)

    @admin.display(description=_("on hold for"), ordering="updated_at")
    def on_hold_for(self, record: Any) -> SafeString:
        return _since(record.updated_at, _ago(record.now - record.updated_at), _("on hold for"))

    @admin.display(description=_("failed"), ordering="updated_at")
    def failed_for(self, record: Any) -> SafeString:
        ago = gettext("{age} ago").format(age=_ago(record.now - record.updated_at))
        return _since(record.updated_at, ago, _("failed"))

    @admin.display(description=_("since"), ordering="updated_at")
    def undecided_for(self, record: Any) -> SafeString:
        since = record.locked_at or record.updated_at
        return _since(since, _ago(record.now - since), _("since"))

    @admin.display(description=_("in flight for"), ordering="locked_at")
    def claim(self, record: Any) -> str | None:
        if record.locked_at is None:
            return None
        since = _ago(record.now - record.locked_at)
        left = _ago(abs(record.locked_until - record.now))
        if record.mode == Mode.LEASE:
            text = (
                gettext("{since}, lease ran out {left} ago")
                if _is_late(record)
                else gettext("{since}, lease for {left} more")
            )
        elif connections[record._state.db].vendor != "postgresql":  # RowLocked can't tell there
            text = gettext("{since}; locked_until is not renewed in atomic mode")
        else:
            text = (
                gettext("{since}, an owner has its row locked")
                if record.locked
                else gettext("{since}, its row is not locked")
            )
        return text.format(since=since, left=left)

    @admin.display(description=_("request"), ordering="path")
    def request(self, record: IdempotencyRecord) -> SafeString:
        return _clamped(f"{record.method} {record.path}")

    @admin.display(description=_("key"), ordering="key")
    def shown_key(self, record: IdempotencyRecord) -> SafeString:
        return _clamped(record.key)

    @admin.display(description=_("scope"), ordering="scope")
    def shown_scope(self, record: IdempotencyRecord) -> SafeString:
        return _clamped(record.scope)

    @admin.display(description=_("path"))
    def shown_path(self, record: IdempotencyRecord) -> SafeString:
        return format_html("<bdi>{}</bdi>", printable(record.path))

    @admin.display(description=_("reason"))
    def shown_reason(self, record: IdempotencyRecord) -> SafeString:
        return _clamped(told_reason(record))

    @admin.display(description=_("key"))
    def copyable_key(self, record: IdempotencyRecord) -> SafeString:
        return _copyable(printable(record.key), _("key"))

    @admin.display(description=_("record id"))
    def copyable_id(self, record: IdempotencyRecord) -> SafeString:
        return _copyable(str(record.pk), _("record id"))

    @admin.display(description=_("record id in logs"))
    def copyable_log_id(self, record: IdempotencyRecord) -> SafeString:
        return _copyable(str(shown_id(record.pk)), _("record id in logs"))

    @admin.display(description=_("fingerprint"))
    def fingerprint_hex(self, record: IdempotencyRecord) -> str:
        return bytes(record.fingerprint).hex()

    @admin.display(description=_("what happened"))
    def events(self, record: Any) -> SafeString:
        events = in_order([*timeline(record, record.now), *_decisions(record), *outbox_events(record)])
        return render_to_string(f"{TEMPLATES}/timeline.html", {"events": events, "now": record.now})

    @admin.display(description=_("what it is"))
    def what(self, record: Any) -> str:
        return advice(record).what

    @admin.display(description=_("what happens by itself"))
    def by_itself(self, record: Any) -> str:
        return advice(record).by_itself

    @admin.display(description=_("safe to do now"))
    def safe(self, record: Any) -> str:
        return advice(record).safe

    @admin.display(description=_("who holds it"))
    def owner(self, record: Any) -> SafeString:
        return format_html("<bdi>{}</bdi>", told_owner(record))

    @admin.display(description=_("trace of the run"))
    def shown_trace(self, record: Any) -> SafeString | None:
        trace = Trace.of(record.trace)
        if trace is None:
            return None
        copyable = _copyable(trace.trace_id, _("trace of the run"))
        if trace.url is None:
            return copyable
        return format_html('{} <a href="{}" rel="noreferrer">{}</a>', copyable, trace.url, _("Open the trace"))

    @admin.display(description=_("response headers"))
    def headers(self, record: IdempotencyRecord) -> SafeString:
        """Return the headers as stored. If the body is encrypted, so are they."""
        response = _stored(record, body=None)
        if is_encrypted(response):
            return format_html("{}", _("encrypted, with the body"))
        return _headers(response)

    @admin.display(description=_("response body"))
    def body(self, record: IdempotencyRecord) -> SafeString:
        stored = _stored(record, body=record.response_body)
        response = decoded(stored, life_of(record))
        headers = {name.lower(): value for name, value in response.headers}
        shown = None if response.body is None else readable(response.body, headers.get("content-type", ""))
        decrypted = _headers(response) if is_encrypted(stored) else ""
        return render_to_string(f"{TEMPLATES}/body.html", {"shown": shown, "headers": decrypted})

    def get_fieldsets(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> Any:
        """Leave out the fields that tell this user nothing about this record."""
        left_out = {name for name, column in SAYS_NOTHING_WITHOUT.items() if not getattr(obj, column, None)}
        if obj is not None and shown_id(obj.pk) == obj.pk:
            left_out.add("copyable_log_id")
        if not request.user.has_perm(RESPONSE_BODY):
            left_out |= {"headers", "body", "token", "fingerprint_hex"}
        shown = [
            (title, {**options, "fields": tuple(name for name in options["fields"] if name not in left_out)})
            for title, options in self.fieldsets
        ]
        return [(title, options) for title, options in shown if options["fields"]]

    # --- What can be done ----------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        return [
            path("dashboard/", self._page(dashboard), name="django_idempotency_dashboard"),
            path("dashboard/figures/", self._page(figures), name="django_idempotency_figures"),
            path("<path:object_id>/child-keys/", self._page(child_keys), name="django_idempotency_child_keys"),
            path("intervene/<str:act>/", self._page(intervene), name="django_idempotency_intervene"),
            *super().get_urls(),
        ]

    def _page(self, view: Callable[..., HttpResponse]) -> Any:
        """Return ``view`` for staff, outside the transaction of ``ATOMIC_REQUESTS``, because it has its own."""
        page: Any = self.admin_site.admin_view(partial(view, self))
        page._non_atomic_requests = set(connections)
        return page

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        return page(self, request, lambda: self._record_page(request, object_id, form_url, extra_context or {}))

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        show = super().history_view
        return page(self, request, lambda: show(request, object_id, extra_context))

    def _record_page(
        self, request: HttpRequest, object_id: str, form_url: str, extra_context: dict[str, Any]
    ) -> HttpResponse:
        record: Any = self.get_object(request, object_id)
        possible = [
            intervention
            for act, intervention in INTERVENTIONS.items()
            if record is not None
            and request.user.has_perm(intervention.permission)
            and not is_own(record.scope, request.user)
            and objection(record, act, record.now) in (None, Refusal.LAPSED)
        ]
        context = {
            "interventions": possible,
            "may_derive": record is not None and request.user.has_perm(RESPONSE_BODY),
            "database_query": query_of(request),
        }
        return super().change_view(request, object_id, form_url, context | extra_context)

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Write a history entry before a body is shown, so that nobody sees one without an entry."""
        if obj is not None and request.user.has_perm(RESPONSE_BODY) and obj.response_body is not None:
            write_entry(obj, request.user, VIEWED)
            signals.send(signals.response_viewed, operation_of(obj), user=request.user)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def has_allow_retry_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(INTERVENTIONS[Act.ALLOW_RETRY].permission)

    def has_fail_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(INTERVENTIONS[Act.FAIL].permission)

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(INTERVENTIONS[Act.RESOLVE].permission)

    def has_extend_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(INTERVENTIONS[Act.EXTEND].permission)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


# --- Of one record ---------------------------------------------------------------------------------------------------


def _standing(record: Any) -> tuple[str, Any]:
    if record.on_hold:
        return "on_hold", _("on hold")
    if record.status in LIVE:
        return ("late", _("past its lease")) if _is_late(record) else ("live", Status(record.status).label)
    if record.response_status is None:
        return "retryable", _("free to retry")
    if record.status == Status.FAILED:
        return "failed", format_lazy(_("failed, {status}"), status=record.response_status)
    return "completed", format_lazy(_("completed, {status}"), status=record.response_status)


def _is_late(record: Any) -> bool:
    """Whether it is past its lease, and no owner is known to be at work."""
    return bool(record.locked_until < record.now) and not record.locked


def _ago(span: timedelta) -> str:
    return age(span.total_seconds())


def _since(moment: datetime, text: str, column: Any) -> SafeString:
    at = in_zone(moment).isoformat(timespec="seconds")
    return format_html('{0} <time datetime="{1}" title="{1}">{2}</time>', _column(column), at, text)


def _column(name: Any) -> SafeString:
    """Return the name of the column, for narrow windows, in which the list has no head."""
    return format_html('<span class="idempotency-column">{}</span>', name)


def _clamped(text: str) -> SafeString:
    """Show the first lines of a long text; all of it on hover, and on the record's page."""
    text = printable(text)
    return format_html('<bdi class="idempotency-clamped" title="{}">{}</bdi>', text, text)


def _as_id(term: str) -> UUID | None:
    try:
        return UUID(term)
    except ValueError:
        return None


def _copyable(text: str, label: Any) -> SafeString:
    return render_to_string(f"{TEMPLATES}/copyable.html", {"text": text, "label": label})


def _stored(record: IdempotencyRecord, *, body: bytes | memoryview | None) -> StoredResponse:
    return StoredResponse.of(record.response_status or 0, record.response_headers or (), body)


def _headers(response: StoredResponse) -> SafeString:
    headers = [(printable(name), printable(value)) for name, value in response.headers]
    return render_to_string(f"{TEMPLATES}/headers.html", {"headers": headers})


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    for entry in entries_of_life(record).select_related("user"):
        yield Event(entry.action_time, printable(told_entry(entry.get_change_message())), printable(str(entry.user)))
