from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_idempotency.conf import conf
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.keys import record_id
from django_idempotency.maintenance import log_entries, stored
from django_idempotency.maintenance.reasons import told_reason
from django_idempotency.maintenance.selection import Selection
from django_idempotency.maintenance.stored import Standing, standing
from django_idempotency.management.base import FAILURE, OneLineErrors, number
from django_idempotency.outcomes import Snapshot
from django_idempotency.policy import Mode
from django_idempotency.printable import printable
from django_idempotency.stats.formatting import age, amount
from django_idempotency.stores import stores_of
from django_idempotency.stores.database import DatabaseStore

LINE = "{standing:14} {age:>12}  {attempt}  {scope}  {key}  {reason}"
WAITING = (Standing.ON_HOLD, Standing.LAPSED)


class Command(OneLineErrors):
    about = gettext_lazy(
        "Shows and frees the records of a store outside the database, such as Redis. list and stats read all of "
        "them. release frees a key that is on hold or whose owner is gone. erase deletes the ended records of one "
        "scope."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("action", choices=["list", "stats", "release", "erase"])
        parser.add_argument("key", nargs="?", help=_("for release: the whole key, as the client sent it"))
        parser.add_argument("--store", required=True, help=_("alias in STORES"))
        parser.add_argument("--scope", help=_('a whole scope, such as "auth.user:7"; needed for release and erase'))
        parser.add_argument(
            "--all", action="store_true", help=_("for list: all records, not only those that wait for a decision")
        )
        parser.add_argument("--limit", type=number(1, int), default=100, help=_("for list: at most this many records"))
        parser.add_argument("--json", action="store_true", help=_("report as JSON, one object per line"))

    def handle(self, *args: Any, action: str, store: str, **options: Any) -> None:
        try:
            self.stores = list(stores_of(conf().policy.derive(mode=Mode.LEASE, store=store)))
            if not all(each.listing for each in self.stores):
                raise CommandError(_("The store %(store)r can't list its records.") % {"store": store})
            getattr(self, f"_{action}")(options)
        except (CommandError, ImproperlyConfigured, StoreUnavailable) as error:
            away = _("The store %(store)r can't be reached: %(error)s") % {"store": store, "error": error}
            raise CommandError(printable(away if isinstance(error, StoreUnavailable) else str(error))) from error

    def _list(self, options: Mapping[str, Any]) -> None:
        found = (record for store in self.stores for record in store.records())
        wanted = (record for record in found if _is_wanted(record, options))
        for record, _place in zip(wanted, range(int(options["limit"])), strict=False):
            facts = _facts(record)
            texts = {name: printable(facts[name]) for name in ("scope", "key")} | {
                "standing": str(standing(record).label),
                "age": age(facts["age"]),
                "attempt": _("attempt %(number)d") % {"number": record.attempts},
                "reason": told_reason(record),
            }
            self._tell(facts, LINE.format_map(texts), options)

    def _stats(self, options: Mapping[str, Any]) -> None:
        counted: Counter[Standing] = sum(map(stored.count, self.stores), start=Counter())
        lines = [f"{name.label:14} {amount(counted[name]):>10}" for name in Standing]
        self._tell({str(name): counted[name] for name in Standing}, "\n".join(lines), options)

    def _release(self, options: Mapping[str, Any]) -> None:
        key, scope = options["key"], options["scope"]
        if key is None or scope is None:
            raise CommandError(_("Pass the key, and its scope with --scope."))
        if isinstance(self.stores[0], DatabaseStore):  # decisions there have rules and a history
            raise CommandError(_("Its records are in a database: idempotency_allow_retry decides about their keys."))
        id = record_id(scope, key)
        store = next((each for each in self.stores if each.read(id)), self.stores[0])
        if why := stored.release(store, id):
            raise CommandError(_("Nothing was done: %(why)s") % {"why": why.label})
        told = _("The key of %(scope)s is free: its next request runs as new.") % {"scope": scope}
        self._tell({"released": [scope]}, told, options)

    def _erase(self, options: Mapping[str, Any]) -> None:
        if options["scope"] is None:
            raise CommandError(_("Pass the scope with --scope."))
        done = [erased for store in self.stores for erased in stored.erase(store, options["scope"])]
        if any(isinstance(store, DatabaseStore) for store in self.stores):
            log_entries.redact_gone(Selection(options["scope"]))
        facts = {"erased": sum(done), "left": len(done) - sum(done)}
        told = ngettext(
            "%(erased)d record erased; left, because they are live or on hold: %(left)d.",
            "%(erased)d records erased; left, because they are live or on hold: %(left)d.",
            facts["erased"],
        )
        self._tell(facts, told % facts, options)
        if facts["left"]:
            sys.exit(FAILURE)

    def _tell(self, facts: Mapping[str, Any], sentence: str, options: Mapping[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(dict(facts)))
        elif options["verbosity"] > 0:
            self.stdout.write("\n".join(map(printable, sentence.split("\n"))))


def _is_wanted(record: Snapshot, options: Mapping[str, Any]) -> bool:
    return options["scope"] in (None, record.scope) and (options["all"] or standing(record) in WAITING)


def _facts(record: Snapshot) -> dict[str, Any]:
    return {
        "scope": record.scope,
        "key": record.key,
        "standing": str(standing(record)),
        "age": round((record.now - record.created_at).total_seconds()),
        "attempts": record.attempts,
        "reason": record.reason,
    }
