from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError, CommandParser

from django_idempotency.maintenance.advice import Standing, advice, shown_reason, standing, standing_of
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
from django_idempotency.maintenance.formatting import age
from django_idempotency.maintenance.reaper import store_of, watch
from django_idempotency.maintenance.records import Records, record_of, records
from django_idempotency.maintenance.timeline import Event, timeline
from django_idempotency.management.base import MaintenanceCommand, number, seconds
from django_idempotency.models import DatabaseNow, RowLocked
from django_idempotency.stores import Store
from django_idempotency.values.keys import is_record_id, record_id
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.printable import in_zone, printable

ACTIONS = {
    "list": "List the keys that are on hold or stuck. Changes nothing.",
    "show": (
        "Show the records of a key: what each is, what happens by itself, what is safe to do now, and what happened. "
        "Never shows responses. Changes nothing."
    ),
    "resolve": (
        "Give a key the response that its operation, which did take place, should have returned: every retry gets it."
    ),
    "fail": "Mark a key as failed for good: it never runs again, and every retry gets a problem response.",
    "allow-retry": (
        "Let the next request with a key run again, if the key is on hold or its owner is gone. First make sure that "
        "the operation did not take place."
    ),
    "extend": (
        "Make the lease of a key last at least the given time from now, for an owner that is well but does not renew "
        "it. A lease is never shortened."
    ),
}


OUTCOMES = {
    Act.ALLOW_RETRY: "free: its next request runs again",
    Act.FAIL: "failed for good: every retry gets the problem response",
    Act.RESOLVE: "resolved: every retry gets the response",
    Act.EXTEND: "held by its owner for at least that long",
}
SHOWN = (
    *("id", "scope", "key", "method", "path", "mode", "status", "attempts", "on_hold", "reason", "created_at"),
    *("locked_at", "locked_until", "updated_at", "expires_at", "purge_at", "replays", "response_status"),
)
LINE = "{standing:14} {age:>12}  {attempts:>3}  {scope}  {key}  {method} {path}  {reason}"
WIDTH = 14


class Command(MaintenanceCommand):
    help = "Lists keys, shows one, and decides about one as an operator does. Exits with 1 if nothing is found or done."
    works_on_stores = True

    def add_arguments(self, parser: CommandParser) -> None:
        for name, action in self.add_actions(parser, ACTIONS):
            super().add_arguments(action)
            if name != "list":
                which = action.add_mutually_exclusive_group(required=True)
                which.add_argument("key", nargs="?", help="the whole key, as the client sent it")
                which.add_argument("--record", type=UUID, help="instead: the id of its record, which logs show, too")
            action.add_argument("--scope", help='a whole scope, such as "auth.user:7"; needed if the key is in several')
            if name not in ("list", "show"):
                self.add_operator(action)
            match name:
                case "list":
                    help = "at most this many; default: 100"
                    action.add_argument("--limit", type=number, default=100, help=help)
                case "resolve":
                    self._add_resolve(action)
                case "fail":
                    help = "of the response, 400 to 599; default: 410"
                    action.add_argument("--status", type=int, default=410, help=help)
                    action.add_argument("--detail", default="", help="for the client, in the problem response")
                case "extend":
                    help = "seconds from now; default: 300"
                    action.add_argument("--seconds", type=seconds, default=300, help=help)

    def _add_resolve(self, action: CommandParser) -> None:
        action.add_argument("--status", type=int, required=True, help="status of the response, 200 to 599")
        action.add_argument("--content-type", default="application/json", help="of the body; default: application/json")
        action.add_argument("--body", default="", help="body of the response; default: none")

    def handle(self, *args: Any, action: str, **options: Any) -> None:
        if action == "list":
            super().handle(**options)
        elif action == "show":
            self._show(options)
        else:
            self._decide(Act(action.replace("-", "_")), options)

    def work(self, *, limit: int, scope: str | None, **options: Any) -> bool:
        found = (each for each in waiting(self.database, self.store) if scope in (None, each.scope))
        first = list(islice(found, limit + 1))
        shown, more = first[:limit], len(first) > limit
        lines = [line(record) for record in shown] or ["No such keys."]
        if more:
            lines.append(f"There are more: these are the first {limit}; see --limit.")
        facts = {"records": [facts_of(record) for record in shown], "more": more}
        self.report(facts, "\n".join(lines), options)
        return True

    def _show(self, options: dict[str, Any]) -> None:
        for found in self._find(options):
            self.database, self.store = found.alias, found.store
            self.report(*described(found.record), options)
        if not self.complete:
            raise CommandError("A database or store could not be searched: the key may have more records there.")

    # --- finding

    def _find(self, options: dict[str, Any]) -> list[Found]:
        """Return the key's records in the scope, or in any. Raise ``CommandError`` if there is none.

        Set ``complete`` to whether each database and store was searched.
        """
        found: list[Found] = []

        def search(*, key: str | None, scope: str | None, record: UUID | None, **_options: Any) -> bool:
            here = found_in(self.database, self.store, key=key, scope=scope, id=record)
            found.extend(Found(self.database, self.store, each) for each in here)
            return True

        self.complete = self.work_on_each(search, **options)
        wanted = [each for each in found if options["scope"] in (None, each.record.scope)]
        if wanted:
            return wanted
        if found:
            raise CommandError(f"The key is not in that scope, but in {_scopes(found)}.")
        if not self.complete:
            raise CommandError("The key was not found, but a database or store could not be searched.")
        raise CommandError(
            "Unknown key: there is no record of it. It was never used, or was released, or its retention is over, or "
            "its run has claimed it by a lock."
        )

    def _chosen(self, act: Act, found: list[Found], options: dict[str, Any]) -> Found:
        possible = [each for each in found if objection_to(act, each.record) is None]
        if not possible:
            raise CommandError("\n".join(why_not(each.record, objection_to(act, each.record)) for each in found))
        if len({each.record.scope for each in possible}) < len(possible):
            places = ", ".join(each.alias for each in possible)
            raise CommandError(f"The key is in several places; pass one of them with --database or --store: {places}.")
        if len(possible) > 1:
            raise CommandError(f"The key is in several scopes; pass one of them with --scope: {_scopes(possible)}.")
        if not self.complete and options["scope"] is None:
            raise CommandError("Nothing was done: the key may also be in other scopes. Pass one with --scope.")
        return possible[0]

    # --- deciding

    def _decide(self, act: Act, options: dict[str, Any]) -> None:
        decide = _decision(act, options)  # refuse what can't be meant before anything else
        found = self._find(options)
        if act != Act.EXTEND and (lapsed := list(filter(_has_only_lapsed, found))):
            self.operator(options, act.permission)  # refuse before waiting, not after it
            self._watch(lapsed, options)
            found = self._find(options)
        chosen = self._chosen(act, found, options)
        self.database, self.store, record = chosen.alias, chosen.store, chosen.record
        by = self.operator(options, act.permission)
        try:
            outcome = decide(record.pk, as_seen=version(record), note=options["note"].strip(), by=by, **self.where)
        except ValueError as error:
            raise CommandError(printable(str(error))) from error
        if isinstance(outcome, Refused):
            raise CommandError(why_not(record, outcome.why))
        self.report({act: [record.scope]}, f"The key of {record.scope} is {OUTCOMES[act]}.", options)

    def _watch(self, lapsed: list[Found], options: dict[str, Any]) -> None:
        """Give owners whose leases have lapsed time to renew them, as they may do after an outage of the store."""
        if options["verbosity"] > 0:
            self.stderr.write("Its lease ran out: watching whether its owner renews it.", self.style.NOTICE)
        for found in lapsed:
            watch(found.store or store_of(found.record), found.record.pk)


def _has_only_lapsed(found: Found) -> bool:
    return objection(found.record, Act.ALLOW_RETRY, found.record.now) is Refusal.LAPSED


def _scopes(found: list[Found]) -> str:
    return ", ".join(printable(each.record.scope) for each in found)


def _decision(act: Act, options: dict[str, Any]) -> Callable[..., Done | Refused]:
    match act:
        case Act.ALLOW_RETRY:
            return allow_retry
        case Act.FAIL:
            return partial(fail, status=options["status"], detail=options["detail"])
        case Act.EXTEND:
            return partial(extend, seconds=options["seconds"])
    response = StoredResponse(options["status"], (("Content-Type", options["content_type"]),), _body(options))
    return partial(resolve, response=response)


def _body(options: dict[str, Any]) -> bytes:
    body = str(options["body"]).encode()
    if body and "json" in options["content_type"]:
        try:
            json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"The body is not JSON: {error}") from None
    return body


# --- The records of a key, and how they stand ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """A record, and where it is: the alias of its database, or of its store."""

    alias: str
    store: Store | None
    record: Any


def read(rows: Records) -> Any:
    """Return ``rows`` with the columns that operators see."""
    return rows.defer("response_body").annotate(now=DatabaseNow(), locked=RowLocked())


def waiting(using: str, store: Store | None) -> Iterator[Any]:
    """Yield the records that are on hold, and then those that are stuck."""
    if store is None:
        rows = read(records(using))
        return chain(rows.awaiting_operator(), rows.abandoned())
    return (record_of(found) for found in store.unfinished() if standing(found) in (Standing.ON_HOLD, Standing.LAPSED))


def found_in(using: str, store: Store | None, *, key: str | None, scope: str | None, id: UUID | None) -> list[Any]:
    """Return the records of a key, in any scope, or the one with an id."""
    if store is None:
        rows = records(using)
        return list(read(rows.with_key(key) if key is not None else rows.filter(pk__in=_ids(id))).order_by("pk"))
    if key is not None and scope is None:
        return [record_of(snapshot) for snapshot in store.records() if snapshot.key == key]
    ids = [record_id(scope or "", key)] if key is not None else _ids(id)
    return [record_of(snapshot) for snapshot in map(store.read, ids) if snapshot]


def _ids(id: UUID | None) -> list[UUID]:
    return [id] if id is not None and is_record_id(id) else []


def objection_to(act: Act, record: Any) -> Refusal | None:
    """Return why ``act`` can't be done to a record that was read with ``now`` and ``locked``."""
    why = objection(record, act, record.now)
    return Refusal.BUSY if why is None and record.locked and act != Act.EXTEND else why


def why_not(record: Any, why: Refusal | None) -> str:
    """Say that nothing was done to a record, how it stands, and what is safe to do."""
    advised = advice(record)
    clear = why is None or why in (Refusal.LIVE, Refusal.HAS_RESPONSE, Refusal.FREE)  # the advice says it
    what = advised.what if clear else f"{why.label} {advised.what}"  # type: ignore[union-attr]
    return f"Nothing was done to {record}. {what}\nSafe to do now: {advised.safe}"


def facts_of(record: Any) -> dict[str, Any]:
    """Return what a JSON report says about a record. It has neither its response nor its token or fingerprint."""
    facts = {name: getattr(record, name) for name in SHOWN}
    return facts | {"standing": str(standing_of(record)), "age": round(_seconds(record))}


def _seconds(record: Any) -> float:
    """Return for how many seconds the record has been in its state: since its claim, or since its end."""
    seconds: float = (record.now - (record.locked_at or record.updated_at)).total_seconds()
    return seconds


def line(record: Any) -> str:
    """Return the line of a list about a record."""
    texts = {name: printable(getattr(record, name)) for name in ("scope", "key", "method", "path")}
    standing = str(standing_of(record).label)
    spent, attempts, reason = age(_seconds(record)), record.attempts, shown_reason(record)
    return LINE.format(standing=standing, age=spent, attempts=attempts, reason=reason, **texts).rstrip()


def described(record: Any) -> tuple[dict[str, Any], str]:
    """Return what there is to say about a record: as facts, and in words."""
    advised, events = advice(record), timeline(record, record.now)
    facts = facts_of(record) | {
        "what": advised.what,
        "by_itself": advised.by_itself,
        "safe": advised.safe,
        "events": [{"at": event.at, "what": str(event.what), "by": event.by} for event in events],
    }
    texts = {
        "what it is": advised.what,
        "by itself": advised.by_itself,
        "safe to do now": advised.safe,
        "request": f"{record.method} {record.path}".strip(),
        "mode": str(record.get_mode_display()),
        "attempts": str(record.attempts),
        "record id": str(record.pk),
    }
    lines = [f"{record}: {standing_of(record).label}"]
    lines += [f"  {name:{WIDTH}}  {printable(text)}" for name, text in texts.items() if text]
    return facts, "\n".join([*lines, "  what happened", *map(_line_of, events)])


def _line_of(event: Event) -> str:
    at = in_zone(event.at).isoformat(" ", "seconds")
    by = f" (by {event.by})" if event.by else ""
    return printable(f"    {at}  {event.what}{by}")
