"""The admin: what is stuck and since when, what a client was told, and what a person can do about it.

Nothing is changed by a form of fields. What a person decides goes through ``interventions``, after a confirmation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import LogEntry
from django.contrib.admin.views.main import ChangeList
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext as _text
from django.utils.translation import gettext_lazy as _

from django_idempotency.confirmations import INTERVENTIONS, confirm, intervene
from django_idempotency.dashboard import dashboard
from django_idempotency.figures import duration
from django_idempotency.interventions import Act, objection
from django_idempotency.maintenance import database
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, Status
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Mode
from django_idempotency.privacy import is_encrypted, opened
from django_idempotency.readable import readable
from django_idempotency.situations import MOST, SITUATIONS, USUAL, Situation, at_work
from django_idempotency.timeline import Event, in_order, timeline

RESPONSE_BODY = "django_idempotency.view_response_body"
TEMPLATES = "admin/django_idempotency/idempotencyrecord"
SAYS_NOTHING_WITHOUT = {
    **{"claim": "locked_at", "reason": "reason", "token": "token"},
    **dict.fromkeys(("response_status", "headers", "body"), "response_status"),
}
METHODS = ("POST", "PUT", "PATCH", "DELETE", "MESSAGE")
MOST_DAYS = 31


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[IdempotencyRecord]
else:
    ModelAdmin = admin.ModelAdmin

Records = QuerySet[IdempotencyRecord]


# --- Filters ---------------------------------------------------------------------------------------------------------


def _situation(request: HttpRequest) -> Situation:
    return SITUATIONS.get(request.GET.get("situation", USUAL), SITUATIONS[USUAL])


def _term(search: str) -> str:
    """What is searched for; empty where nothing is, and for what no key has."""
    return "" if "\0" in search else search.strip().strip('"')


class SituationFilter(admin.SimpleListFilter):
    """Which list it is. Always one of them, because together they have no index; a search looks at all records."""

    title = _("situation")
    parameter_name = "situation"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        rows = IdempotencyRecord.objects.using(database())
        return [(name, _counted(situation, rows)) for name, situation in SITUATIONS.items()]

    def choices(self, changelist: Any) -> Iterator[Any]:
        chosen = None if changelist.query else self.value() or USUAL
        for name, title in self.lookup_choices:
            query = changelist.get_query_string({self.parameter_name: name}, ["q", "when", "p", "o"])
            yield {"selected": name == chosen, "query_string": query, "display": title}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        if _term(request.GET.get("q", "")):
            return queryset
        since, until = _span(request.GET.get("when", ""))
        return _situation(request).first(queryset, since, until)


def _counted(situation: Situation, rows: Records) -> Any:
    count = situation.count(rows)
    if count is None:
        return situation.title
    return format_lazy("{title} ({count}{more})", title=situation.title, count=count, more="+" * (count >= 1000))


class TimeFilter(admin.SimpleListFilter):
    """By day, then by hour, of the time that the situation's index is ordered by."""

    title: Any = _("time")
    parameter_name = "when"

    def __init__(self, request: HttpRequest, *arguments: Any) -> None:
        super().__init__(request, *arguments)
        self.title = _situation(request).time

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        if _term(request.GET.get("q", "")):
            return []
        span = _situation(request).span(IdempotencyRecord.objects.using(database()))
        return [] if span is None else list(_times(*span, request.GET.get("when", "")))

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset  # the situation's filter has done it


def _times(first: datetime, last: datetime, chosen: str) -> Iterator[tuple[str, str]]:
    first, last = timezone.localtime(first), timezone.localtime(last)
    for days in range(min((last.date() - first.date()).days + 1, MOST_DAYS)):
        day = last.date() - timedelta(days=days)
        yield f"{day}", date_format(day, "DATE_FORMAT")
        if chosen.startswith(f"{day}"):
            for hour in range(24):
                yield f"{day}T{hour:02}", f"{hour:02}:00–{hour:02}:59"


def _span(when: str) -> tuple[datetime | None, datetime | None]:
    try:
        since = timezone.make_aware(datetime.fromisoformat(when))
        return since, since + (timedelta(hours=1) if "T" in when else timedelta(days=1))
    except (ValueError, OverflowError):
        return None, None


class MethodFilter(admin.SimpleListFilter):
    """Of a fixed choice: to look which there are, every record would have to be read."""

    title = _("method")
    parameter_name = "method"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(method, method) for method in METHODS]

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        return queryset.filter(method=self.value()) if self.value() else queryset


class PathFilter(admin.SimpleListFilter):
    """What the path starts with, typed in."""

    title = _("path")
    parameter_name = "path"
    template = f"{TEMPLATES}/path_filter.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("", "")]

    def choices(self, changelist: Any) -> Iterator[Any]:
        others = [(name, value) for name, values in changelist.filter_params.items() for value in values]
        kept = [pair for pair in others if pair[0] != self.parameter_name]
        if changelist.query:
            kept.append(("q", changelist.query))
        without = changelist.get_query_string(remove=[self.parameter_name, "p"])
        yield {"selected": bool(self.value()), "value": self.value() or "", "others": kept, "without": without}

    def queryset(self, request: HttpRequest, queryset: Records) -> Records:
        beginning = self.value()
        if not beginning:
            return queryset
        return queryset.none() if "\0" in beginning else queryset.filter(path__startswith=beginning)


# --- The list --------------------------------------------------------------------------------------------------------


class RecordList(ChangeList):
    """Knows of each record on the page whether a running transaction has its row locked."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        claimed = [record.pk for record in self.result_list if record.status in LIVE and record.mode == Mode.ATOMIC]
        locked = at_work(claimed, using=database())
        for record in self.result_list:
            record.locked = None if locked is None else record.pk in locked


def _intervening(act: Act) -> Any:
    """The action that leads to the confirmation."""
    title: Any = INTERVENTIONS[act].title

    @admin.action(description=title, permissions=[str(act)])
    def action(model_admin: Any, request: HttpRequest, queryset: Records) -> HttpResponse | None:
        # Those that were ticked, and never all pages: a person answers for what was seen.
        records = list(queryset.filter(pk__in=request.POST.getlist(ACTION_CHECKBOX_NAME)))
        if not records:
            messages.warning(request, _text("What you chose is no longer in this list."))
            return None
        if act == Act.RESOLVE and len(records) > 1:
            messages.warning(request, _text("Choose one record: each has an answer of its own."))
            return None
        return confirm(model_admin, request, act, records)

    action.__name__ = f"{act}_records"
    return action


@admin.register(IdempotencyRecord)
class IdempotencyRecordAdmin(ModelAdmin):
    list_display = ("key", "badge", "claim", "request", "scope", "attempts", "replays", "created_at")
    list_filter = (SituationFilter, TimeFilter, PathFilter, MethodFilter, "mode")
    list_per_page = 50
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("key",)
    search_help_text = _("A whole key, as the client sent it, or a record’s id; in whatever situation it is.")
    actions = [_intervening(act) for act in INTERVENTIONS]
    change_list_template = f"{TEMPLATES}/change_list.html"
    change_form_template = f"{TEMPLATES}/change_form.html"
    fieldsets = (
        (None, {"fields": ("copyable_key", "scope", "badge", "claim", "reason")}),
        (_("Timeline"), {"fields": ("events",)}),
        (_("Request"), {"fields": ("method", "path", "fingerprint_hex", "copyable_id")}),
        (_("Claim"), {"fields": ("mode", "hold_on_crash", "attempts", "token")}),
        (_("Answer"), {"fields": ("response_status", "headers", "body")}),
        (
            _("Times"),
            {
                "classes": ("collapse",),
                "fields": (
                    *("created_at", "updated_at", "locked_at", "locked_until", "expires_at", "purge_at"),
                    *("replays", "last_replayed_at"),
                ),
            },
        ),
    )

    class Media:
        css = {"all": ("django_idempotency/admin.css",)}
        js = ("django_idempotency/copy.js",)

    # --- What is read, and how -----------------------------------------------------------------------------------

    def get_queryset(self, request: HttpRequest) -> Records:
        """From where the records are kept, never a replica: it would show what is stuck too late."""
        rows = super().get_queryset(request).using(database())
        return rows.annotate(now=DatabaseNow()).defer("response_body")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        # Or an answer could be found out, bit by bit, by who may not see it.
        return not lookup.startswith("response_body") and super().lookup_allowed(lookup, value, request)

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("pk",) if _term(request.GET.get("q", "")) else _situation(request).ordering

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return RecordList

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> Any:
        searched = bool(_term(request.GET.get("q", "")))
        situation = None if searched else _situation(request)
        return super().changelist_view(request, {"situation": situation, "most": MOST, **(extra_context or {})})

    def get_search_results(self, request: HttpRequest, queryset: Records, search_term: str) -> tuple[Records, bool]:
        """By the primary key: one record's, or the range that a raw key maps to. Never through the table."""
        term = _term(search_term)
        if not term:
            return queryset, False
        found = queryset & IdempotencyRecord.objects.using(queryset.db).with_key(term)
        id = _as_id(term)
        return (queryset.filter(pk=id) if id is not None and not found.exists() else found), False

    # --- What is shown -------------------------------------------------------------------------------------------

    @admin.display(description=_("status"), ordering="status")
    def badge(self, record: Any) -> SafeString:
        name, text = _standing(record)
        return format_html('<span class="idempotency-badge {}">{}</span>', name, text)

    @admin.display(description=_("in flight for"), ordering="locked_at")
    def claim(self, record: Any) -> str | None:
        if record.locked_at is None:
            return None
        since = _ago(record.now - record.locked_at)
        locked = record.locked if hasattr(record, "locked") else _is_locked(record)
        left = _ago(abs(record.locked_until - record.now))
        if record.mode == Mode.LEASE:
            text = (
                _text("{since}, lease ran out {left} ago")
                if _is_late(record)
                else _text("{since}, lease for {left} more")
            )
        elif locked is None:
            text = _text("{since}; locked_until is not renewed in atomic mode")
        else:
            text = (
                _text("{since}, a holder has its row locked") if locked else _text("{since}, nobody has its row locked")
            )
        return text.format(since=since, left=left)

    @admin.display(description=_("request"), ordering="path")
    def request(self, record: IdempotencyRecord) -> str:
        return f"{record.method} {record.path}"

    @admin.display(description=_("key"))
    def copyable_key(self, record: IdempotencyRecord) -> SafeString:
        return _copyable(record.key, _("key"))

    @admin.display(description=_("record id"))
    def copyable_id(self, record: IdempotencyRecord) -> SafeString:
        return _copyable(str(record.pk), _("record id"))

    @admin.display(description=_("fingerprint"))
    def fingerprint_hex(self, record: IdempotencyRecord) -> str:
        return bytes(record.fingerprint).hex()

    @admin.display(description=_("what happened"))
    def events(self, record: Any) -> SafeString:
        events = in_order([*timeline(record, record.now), *_decisions(record)])
        return render_to_string(f"{TEMPLATES}/timeline.html", {"events": events, "now": record.now})

    @admin.display(description=_("response headers"))
    def headers(self, record: IdempotencyRecord) -> SafeString:
        """As stored; with the body encrypted, they are too."""
        response = _stored(record, body=None)
        if is_encrypted(response):
            return format_html("{}", _("encrypted, with the body"))
        return _headers(response)

    @admin.display(description=_("response body"))
    def body(self, record: IdempotencyRecord) -> SafeString:
        stored = _stored(record, body=record.response_body)
        response = opened(stored, record.pk)
        headers = {name.lower(): value for name, value in response.headers}
        shown = None if response.body is None else readable(response.body, headers.get("content-type", ""))
        decrypted = _headers(response) if is_encrypted(stored) else ""
        return render_to_string(f"{TEMPLATES}/body.html", {"shown": shown, "headers": decrypted})

    def get_fieldsets(self, request: HttpRequest, obj: IdempotencyRecord | None = None) -> Any:
        """Those that say something about this record to this person."""
        left_out = {name for name, column in SAYS_NOTHING_WITHOUT.items() if not getattr(obj, column, None)}
        if not request.user.has_perm(RESPONSE_BODY):
            left_out.add("body")
        shown = [
            (title, {**options, "fields": tuple(name for name in options["fields"] if name not in left_out)})
            for title, options in self.fieldsets
        ]
        return [(title, options) for title, options in shown if options["fields"]]

    # --- What can be done ----------------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        return [
            path("dashboard/", self._page(dashboard), name="django_idempotency_dashboard"),
            path("intervene/<str:act>/", self._page(intervene), name="django_idempotency_intervene"),
            *super().get_urls(),
        ]

    def _page(self, view: Callable[..., HttpResponse]) -> Any:
        """``view`` for the staff, outside the transaction of ``ATOMIC_REQUESTS``: it has its own."""
        page: Any = self.admin_site.admin_view(partial(view, self))
        page._non_atomic_requests = set(connections)
        return page

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        record: Any = self.get_object(request, object_id)
        possible = [
            intervention
            for act, intervention in INTERVENTIONS.items()
            if record is not None
            and request.user.has_perm(intervention.permission)
            and objection(record, act, record.now) is None
        ]
        return super().change_view(request, object_id, form_url, {"interventions": possible, **(extra_context or {})})

    def has_release_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(INTERVENTIONS[Act.RELEASE].permission)

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
    if record.held:
        return "held", _("held")
    if record.status in LIVE:
        return ("late", _("past its lease")) if _is_late(record) else ("live", Status(record.status).label)
    if record.response_status is None:
        return "retryable", _("free to retry")
    if record.status == Status.FAILED:
        return "failed", format_lazy(_("failed, {status}"), status=record.response_status)
    return "completed", format_lazy(_("completed, {status}"), status=record.response_status)


def _is_late(record: Any) -> bool:
    return bool(record.locked_until < record.now)


def _is_locked(record: Any) -> bool | None:
    locked = at_work([record.pk], using=database())
    return None if locked is None else record.pk in locked


def _ago(span: timedelta) -> str:
    seconds = round(span.total_seconds())
    return f"{seconds} s" if seconds < 10 else duration(seconds)


def _as_id(term: str) -> UUID | None:
    try:
        return UUID(term)
    except ValueError:
        return None


def _copyable(text: str, label: Any) -> SafeString:
    return render_to_string(f"{TEMPLATES}/copyable.html", {"text": text, "label": label})


def _stored(record: IdempotencyRecord, *, body: bytes | memoryview | None) -> StoredResponse:
    headers = tuple((name, value) for name, value in record.response_headers or ())
    return StoredResponse(record.response_status or 0, headers, None if body is None else bytes(body))


def _headers(response: StoredResponse) -> SafeString:
    return render_to_string(f"{TEMPLATES}/headers.html", {"headers": response.headers})


def _decisions(record: IdempotencyRecord) -> Iterator[Event]:
    kind = ContentType.objects.get_for_model(IdempotencyRecord)
    entries = LogEntry.objects.filter(content_type=kind, object_id=str(record.pk)).select_related("user")
    for entry in entries.order_by("action_time"):
        yield Event(entry.action_time, entry.get_change_message(), str(entry.user))
