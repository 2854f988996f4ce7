from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, islice
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser, no_translations
from django.db.models import TextChoices

from django_idempotency.maintenance.advice import (
    Standing,
    TimelineEntry,
    advice,
    seconds_of,
    shown_reason,
    standing_of,
    timeline,
)
from django_idempotency.maintenance.decision_forms import INTERVENTIONS, Intervention
from django_idempotency.maintenance.decisions import Refusal, version
from django_idempotency.maintenance.find import SITUATIONS, Wanted, moment
from django_idempotency.maintenance.formatting import age
from django_idempotency.maintenance.reaper import watch
from django_idempotency.maintenance.records import Records, record_of, records
from django_idempotency.maintenance.sessions import session_of, sessions_by_lock
from django_idempotency.management.base import MaintenanceCommand, number
from django_idempotency.models import DatabaseNow, RowLocked
from django_idempotency.stores import Store
from django_idempotency.values.keys import record_id
from django_idempotency.values.printable import in_zone, printable

ACTIONS = {
    "list": (
        "List the keys that are on hold or stuck, or in another situation; by"
        " endpoint, customer or time if you like. Changes nothing."
    ),
    "show": (
        "Show the records of a key: what each is, what happens by itself, what is safe"
        " to do now, and what happened. Never shows responses. Changes nothing."
    ),
}
SHOWN = (
    "id",
    "scope",
    "key",
    "method",
    "path",
    "mode",
    "status",
    "attempts",
    "on_hold",
    "reason",
    "created_at",
    "locked_at",
    "locked_until",
    "updated_at",
    "expires_at",
    "purge_at",
    "replays",
    "response_status",
)
LINE = (
    "{standing:14} {age:>12}  {attempts:>3}  {scope}  {key}  {method} {path}  {reason}"
)
WIDTH = 14
IN_STORE = {
    "live": (Standing.RUNNING, Standing.LAPSED),
    "stuck": (Standing.LAPSED,),
    "on_hold": (Standing.ON_HOLD,),
}
IN_FLIGHT_BY_LOCK = (
    "In flight, without a record yet, because its claim is a lock. It is held by"
)


class Command(MaintenanceCommand):
    help = (
        "Lists keys, shows one, and decides about one as an operator does. Exits with 1"
        " if nothing is found or done."
    )
    works_on_stores = True

    @no_translations
    def add_arguments(self, parser: CommandParser) -> None:
        forms = {act.replace("_", "-"): form for act, form in INTERVENTIONS.items()}
        acts = {name: f"{form.title}. {form.asks}" for name, form in forms.items()}
        for name, action in self.add_actions(parser, ACTIONS | acts):
            super().add_arguments(action)
            if name != "list":
                which = action.add_mutually_exclusive_group(required=True)
                which.add_argument(
                    "key", nargs="?", help="the whole key, as the client sent it"
                )
                which.add_argument(
                    "--record",
                    type=UUID,
                    help="instead: the id of its record, which logs show, too",
                )
            action.add_argument(
                "--scope",
                help=(
                    'a whole scope, such as "auth.user:7"; needed if the key is in'
                    " several"
                ),
            )
            if name == "list":
                action.add_argument(
                    "--limit",
                    type=number,
                    default=100,
                    help="at most this many; default: 100",
                )
                self._add_filters(action)
            elif name in forms:
                self.add_operator(action)
                self._add_fields(action, forms[name])

    def _add_filters(self, action: CommandParser) -> None:
        action.add_argument(
            "--situation",
            choices=[*SITUATIONS],
            help="instead of those on hold or stuck; retryable, done: databases only",
        )
        action.add_argument(
            "--endpoint",
            default="",
            help='what the path begins with, also after a method: "POST /pay/";'
            " databases only",
        )
        for name, word in (("--since", "or later"), ("--until", "before")):
            action.add_argument(
                name,
                type=moment,
                help=f"first claimed then {word}: a date or a time, ISO 8601",
            )

    def _add_fields(self, action: CommandParser, form: type[Intervention]) -> None:
        for name, field in form.base_fields.items():
            if name == "note":  # as for other commands
                continue
            help = f"{field.help_text or field.label}".removesuffix(".") + "."
            help += f" Default: {field.initial}." if field.initial else ""
            choices = [value for value, _label in getattr(field, "choices", ())]
            action.add_argument(
                f"--{name.replace('_', '-')}",
                required=field.required and not field.initial,
                default=field.initial or "",
                choices=choices or None,
                help=help,
            )

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        if action == "list":
            super().handle(**options)
        elif action == "show":
            self._show(options)
        else:
            self._decide(INTERVENTIONS[action.replace("-", "_")], options)

    def work(
        self,
        *,
        limit: int,
        scope: str | None,
        situation: str | None,
        endpoint: str,
        since: Any,
        until: Any,
        **options: Any,
    ) -> bool:
        wanted = Wanted(endpoint=endpoint, scope=scope or "", since=since, until=until)
        names = [situation] if situation else ["on_hold", "stuck"]
        found = listed(self.database, self.store, names, wanted)
        first = list(islice(found, limit + 1))
        shown, more = first[:limit], len(first) > limit
        lines = [line(record) for record in shown] or ["No such keys."]
        if more:
            lines.append(f"There are more: these are the first {limit}; see --limit.")
        facts = {"records": [facts_of(record) for record in shown], "more": more}
        self.report(facts, "\n".join(lines), options)
        return True

    def _show(self, options: dict[str, Any]) -> None:
        for record in self._find(options):
            self.database, self.store = record.alias, record.store
            self.report(*described(record), options)
        for alias, session in self.by_lock:
            self.database, self.store = alias, None
            facts = {"claim": "lock", "session": asdict(session)}
            self.report(facts, f"{IN_FLIGHT_BY_LOCK} {session}.", options)
        if not self.complete:
            raise CommandError(
                "A database or store could not be searched: the key may have more"
                " records there."
            )

    # --- finding

    def _find(self, options: dict[str, Any]) -> list[Any]:
        """Return the key's records in the scope, or in any. Raise ``CommandError`` if
        there is none.

        Each has the ``alias`` of the place where it is, and its ``store`` if that is
        outside the databases. Set ``complete`` to whether each database and store was
        searched, and ``by_lock`` to the sessions that run the key without a record.
        """
        found: list[Any] = []
        self.by_lock: list[tuple[str, Any]] = []

        def search(
            *, key: str | None, scope: str | None, record: UUID | None, **_options: Any
        ) -> bool:
            for each in found_in(
                self.database, self.store, key=key, scope=scope, id=record
            ):
                each.alias, each.store = self.database, self.store
                found.append(each)
            if self.store is None:
                id = record if key is None or scope is None else record_id(scope, key)
                running = sessions_by_lock(self.database, key=key or "", id=id)
                self.by_lock += [(self.database, session) for session in running]
            return True

        self.complete = self.work_on_each(search, **options)
        wanted = [
            record for record in found if options["scope"] in (None, record.scope)
        ]
        if wanted or self.by_lock:
            return wanted
        if found:
            raise CommandError(
                f"The key is not in that scope, but in {_scopes(found)}."
            )
        if not self.complete:
            raise CommandError(
                "The key was not found, but a database or store could not be searched."
            )
        raise CommandError(
            "Unknown key: there is no record of it. It was never used, or was released,"
            " or its retention is over."
        )

    def _chosen(self, kind: type[Intervention], found: list[Any], options: Any) -> Any:
        possible = [record for record in found if kind.objection(record) is None]
        if not possible:
            refusals = [why_not(record, kind.objection(record)) for record in found]
            refusals += [
                f"Nothing was done. {IN_FLIGHT_BY_LOCK} {session}."
                for _alias, session in self.by_lock
            ]
            raise CommandError("\n".join(refusals))
        if len({record.scope for record in possible}) < len(possible):
            places = ", ".join(record.alias for record in possible)
            raise CommandError(
                "The key is in several places; pass one of them with --database or"
                f" --store: {places}."
            )
        if len(possible) > 1:
            raise CommandError(
                "The key is in several scopes; pass one of them with --scope:"
                f" {_scopes(possible)}."
            )
        if not self.complete and options["scope"] is None:
            raise CommandError(
                "Nothing was done: the key may also be in other scopes. Pass one with"
                " --scope."
            )
        return possible[0]

    # --- deciding

    def _decide(self, kind: type[Intervention], options: dict[str, Any]) -> None:
        _valid(kind(options))
        by = self.operator(options, kind.act.permission)
        found = self._find(options)
        if lapsed := [
            record for record in found if kind.objection(record) is Refusal.LAPSED
        ]:
            self._watch(lapsed, options)
            found = self._find(options)
        record = self._chosen(kind, found, options)
        form = _valid(kind(options, record=record))
        self.database, self.store = record.alias, record.store
        outcome = form.do(
            record.pk, as_seen=version(record), by=by, **form.terms(), **self.where
        )
        if isinstance(outcome, TextChoices):
            raise CommandError(why_not(record, outcome))
        self.report(
            {form.act: [record.scope]},
            f"{form.title}: done for the key of {record.scope}.",
            options,
        )

    def _watch(self, lapsed: list[Any], options: dict[str, Any]) -> None:
        """Give owners whose leases have lapsed time to renew them, as they may do after
        an outage of the store.
        """
        if options["verbosity"] > 0:
            self.stderr.write(
                "Its lease ran out: watching whether its owner renews it.",
                self.style.NOTICE,
            )
        for record in lapsed:
            watch(record, record.store)


def _valid(form: Intervention) -> Intervention:
    if not form.is_valid():
        errors = form.errors.items()
        texts = [f"{name}: {' '.join(map(str, each))}" for name, each in errors]
        raise CommandError("\n".join(texts))
    return form


def _scopes(found: list[Any]) -> str:
    return ", ".join(printable(record.scope) for record in found)


# --- The records of a key, and how they stand -----------------------------------------


def read(rows: Records) -> Any:
    """Return ``rows`` with the columns that operators see."""
    return rows.defer("response_body").annotate(now=DatabaseNow(), locked=RowLocked())


def listed(
    using: str, store: Store | None, names: list[str], wanted: Wanted
) -> Iterator[Any]:
    """Yield the records in one situation after another that are ``wanted``."""
    if store is None:
        rows = read(records(using))
        return chain.from_iterable(
            wanted.among(SITUATIONS[name].first(rows)).order_by(
                SITUATIONS[name].ordering
            )
            for name in names
        )
    stands = {each for name in names for each in IN_STORE.get(name, ())}
    found = map(record_of, store.unfinished())
    return (
        record
        for record in found
        if standing_of(record) in stands and wanted.includes(record)
    )


def found_in(
    using: str, store: Store | None, *, key: str | None, scope: str | None, id: Any
) -> list[Any]:
    """Return the records of a key, in any scope, or the one with an id."""
    if store is None:
        rows = records(using)
        return list(
            read(rows.with_id(id) if key is None else rows.with_key(key)).order_by("pk")
        )
    if key is not None and scope is None:
        return [
            record_of(snapshot) for snapshot in store.records() if snapshot.key == key
        ]
    snapshot = store.read(id if key is None else record_id(scope or "", key))
    return [record_of(snapshot)] if snapshot else []


def why_not(record: Any, why: TextChoices | None) -> str:
    """Say that nothing was done to a record, how it stands, and what is safe to do."""
    advised = advice(record)
    # the advice says it
    clear = why is None or why in (Refusal.LIVE, Refusal.HAS_RESPONSE, Refusal.FREE)
    what = advised.what if clear else f"{why.label} {advised.what}"  # type: ignore[union-attr]
    return f"Nothing was done to {record}. {what}\nSafe to do now: {advised.safe}"


def facts_of(record: Any) -> dict[str, Any]:
    """Return what a JSON report says about a record. It has neither its response nor
    its token or fingerprint.
    """
    facts = {name: getattr(record, name) for name in SHOWN}
    return facts | {
        "standing": str(standing_of(record)),
        "age": round(seconds_of(record)),
    }


def line(record: Any) -> str:
    """Return the line of a list about a record."""
    texts = {
        name: printable(getattr(record, name))
        for name in ("scope", "key", "method", "path")
    }
    standing = str(standing_of(record).label)
    spent, attempts, reason = (
        age(seconds_of(record)),
        record.attempts,
        shown_reason(record),
    )
    return LINE.format(
        standing=standing, age=spent, attempts=attempts, reason=reason, **texts
    ).rstrip()


def described(record: Any) -> tuple[dict[str, Any], str]:
    """Return what there is to say about a record: as facts, and in words."""
    advised, events, session = advice(record), timeline(record), session_of(record)
    facts = facts_of(record) | {
        "what": advised.what,
        "by_itself": advised.by_itself,
        "safe": advised.safe,
        "events": [
            {"at": event.at, "what": str(event.what), "by": event.by}
            for event in events
        ],
        "session": session and asdict(session),
    }
    texts = {
        "what it is": advised.what,
        "by itself": advised.by_itself,
        "safe to do now": advised.safe,
        "request": f"{record.method} {record.path}".strip(),
        "mode": str(record.get_mode_display()),
        "attempts": str(record.attempts),
        "record id": str(record.pk),
        "row locked by": str(session or ""),
    }
    lines = [f"{record}: {standing_of(record).label}"]
    lines += [
        f"  {name:{WIDTH}}  {printable(str(text))}"
        for name, text in texts.items()
        if text
    ]
    return facts, "\n".join([*lines, "  what happened", *map(_line_of, events)])


def _line_of(event: TimelineEntry) -> str:
    at = in_zone(event.at).isoformat(" ", "seconds")
    by = f" (by {event.by})" if event.by else ""
    return printable(f"    {at}  {event.what}{by}")
