"""What the commands that look up one key share, and those that decide about it as an operator does in the admin."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import CommandError, CommandParser
from django.utils.functional import Promise
from django.utils.translation import gettext as _

from django_idempotency.conf import conf
from django_idempotency.maintenance.advice import advice, standing_of
from django_idempotency.maintenance.interventions import Act, Done, Refusal, Refused, objection, version
from django_idempotency.maintenance.lock_owners import lock_owners, told_lock_owners
from django_idempotency.maintenance.log_entries import is_kept, write_entry
from django_idempotency.maintenance.owners import Owner
from django_idempotency.maintenance.records import records
from django_idempotency.maintenance.stored import watched
from django_idempotency.management.base import MaintenanceCommand
from django_idempotency.models import DatabaseNow, RowLocked
from django_idempotency.printable import printable
from django_idempotency.stores import store_for

LONGEST_NOTE = 200  # characters, as in the admin


SHOWN = (
    *("id", "scope", "key", "method", "path", "mode", "status", "attempts", "on_hold", "reason", "created_at"),
    *("locked_at", "locked_until", "updated_at", "expires_at", "purge_at", "replays", "response_status"),
)


def facts_of(record: Any) -> dict[str, Any]:
    """Return what a JSON report says about a record. It has neither its response nor its token or fingerprint."""
    facts = {name: getattr(record, name) for name in SHOWN}
    return facts | {"standing": str(standing_of(record)), "age": round((record.now - since(record)).total_seconds())}


def since(record: Any) -> datetime:
    """Return since when the record has been in its current state: since its claim, or since its end."""
    moment: datetime = record.locked_at or record.updated_at
    return moment


class KeyCommand(MaintenanceCommand):
    """Takes a key and ``--scope``, and finds its records in all databases."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("key", help=_("the whole key, as the client sent it"))
        parser.add_argument("--scope", help=_('a whole scope, such as "auth.user:7"; needed if the key is in several'))

    def find(self, options: dict[str, Any]) -> list[tuple[str, Any]]:
        """Return the key's records in the scope, or in any, each with its database. Raise ``CommandError`` if none.

        Set ``complete`` to whether each database was looked at.
        """
        self.found: list[tuple[str, Any]] = []
        self.owners: list[Owner] = []
        self.complete = self.work_on_each(**options)
        scope = options["scope"]
        wanted = [(using, record) for using, record in self.found if scope in (None, record.scope)]
        if wanted:
            return wanted
        if self.owners:
            raise CommandError("\n  ".join(told_lock_owners(self.owners, options["key"])))
        if self.found:
            raise CommandError(_("The key is not in that scope, but in %(scopes)s.") % {"scopes": _scopes(self.found)})
        if not self.complete:
            raise CommandError(_("The key was not found, but a database could not be looked at."))
        raise CommandError(
            _("Unknown key: there is no record of it. It was never used, or was released, or its retention is over.")
        )

    def work(self, *, key: str, scope: str | None, **options: Any) -> bool:
        rows = records(self.database).with_key(key)
        read = rows.defer("response_body").annotate(now=DatabaseNow(), locked=RowLocked())
        found = list(read.order_by("pk"))
        self.found += [(self.database, record) for record in found]
        if not any(scope in (None, record.scope) for record in found):
            self.owners += lock_owners(self.database, key, scope)
        return True


class DecisionCommand(KeyCommand):
    """Does ``act`` to the one record of the key that allows it, and writes who did so and why into its history."""

    act: Act
    did: str  # the name of the scope in the JSON report
    done: str | Promise  # what is then reported about the key of %(scope)s
    would: str | Promise  # the same for a dry run

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--by", metavar="USER", help=_("name of the user who decides, for the record's history"))
        parser.add_argument("--note", default="", help=_("why, for the record's history"))
        parser.add_argument("--dry-run", action="store_true", help=_("only look; change nothing"))

    def decide(self, record: Any, options: dict[str, Any], **named: Any) -> Done | Refused:
        """Call one of ``maintenance.interventions``. ``named`` has the arguments that all of them take."""
        raise NotImplementedError

    def given(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what the history entry says of the decision. Raise ``CommandError`` for options that can't be meant.

        This is called before anything else is done.
        """
        return {}

    def handle(self, *args: Any, **options: Any) -> None:
        given = self.given(options)
        if len(options["note"]) > LONGEST_NOTE:
            told = _("--note has %(length)d characters; at most %(most)d are allowed.")
            raise CommandError(told % {"length": len(options["note"]), "most": LONGEST_NOTE})
        found = self.find(options)
        if options["dry_run"]:
            self.database, record = self._chosen(found, options)
        else:
            if lapsed := self._lapsed(found):
                self._user(options)  # refuse before waiting, not after it
                self._watch(lapsed, options)
                found = self.find(options)
            self.database, record = self._chosen(found, options)
            self._decide(record, options, given)
        told = str(self.would if options["dry_run"] else self.done)
        self.report({self.did: [record.scope]}, told % {"scope": record.scope}, options)

    def _user(self, options: dict[str, Any]) -> Any:
        """Return the named user, who must have the admin's permission for it; only the name if there is no admin."""
        if not is_kept():
            return options["by"]
        if not options["by"]:
            raise CommandError(
                _("Pass --by with the name of the user who decides: it is kept in the history of the record.")
            )
        model: Any = get_user_model()
        name = printable(options["by"])
        try:
            user = model._default_manager.get_by_natural_key(options["by"])
        except model.DoesNotExist:
            raise CommandError(_("There is no user %(user)s.") % {"user": name}) from None
        permission = f"django_idempotency.{self.act}_idempotencyrecord"
        if not user.has_perm(permission):  # inactive users have none
            told = _("The user %(user)s does not have the permission %(permission)s.")
            raise CommandError(told % {"user": name, "permission": permission})
        return user

    def _lapsed(self, found: list[tuple[str, Any]]) -> list[Any]:
        return [] if self.act == Act.EXTEND else [record for _using, record in found if _has_only_lapsed(record)]

    def _watch(self, lapsed: list[Any], options: dict[str, Any]) -> None:
        """Give owners whose leases have lapsed time to renew them, as they may do after an outage of the store."""
        if options["verbosity"] > 0:
            self.stderr.write(_("Its lease ran out: watching whether its owner renews it."), self.style.NOTICE)
        for record in lapsed:
            store = store_for(replace(conf().policy, using=record._state.db))
            if snapshot := store.read(record.pk):
                watched(store, snapshot)

    def _chosen(self, found: list[tuple[str, Any]], options: dict[str, Any]) -> tuple[str, Any]:
        possible = [(using, record) for using, record in found if self._objection(record) is None]
        if not possible:
            raise CommandError("\n".join(self._why_not(record, self._objection(record)) for _using, record in found))
        if len(possible) > 1:
            told = _("The key is in several scopes; pass one of them with --scope: %(scopes)s.")
            raise CommandError(told % {"scopes": _scopes(possible)})
        if not self.complete and options["scope"] is None:
            raise CommandError(_("Nothing was done: the key may also be in other scopes. Pass one with --scope."))
        return possible[0]

    def _objection(self, record: Any) -> Refusal | None:
        why = objection(record, self.act, record.now)
        return Refusal.BUSY if why is None and record.locked and self.act != Act.EXTEND else why

    def _why_not(self, record: Any, why: Refusal | None) -> str:
        told = advice(record)
        what = told.what if why in _TOLD_BY_ADVICE or why is None else f"{why.label} {told.what}"
        nothing = _("Nothing was done to %(record)s.") % {"record": record}
        safe = _("Safe to do now: %(what)s") % {"what": told.safe}
        return f"{nothing} {what}\n{safe}"

    def _decide(self, record: Any, options: dict[str, Any], given: dict[str, Any]) -> None:
        user, note = self._user(options), options["note"].strip()

        def witness(done: Done) -> None:
            if is_kept():
                from django_idempotency.admin.actions import INTERVENTIONS

                write_entry(done.record, user, INTERVENTIONS[self.act].entry(given, done, note))

        named = {"as_seen": version(record), "witness": witness, "using": self.database, "note": note, "by": user}
        try:
            outcome = self.decide(record, options, **named)
        except ValueError as error:
            raise CommandError(printable(str(error))) from error
        if isinstance(outcome, Refused):
            raise CommandError(self._why_not(record, outcome.why))


_TOLD_BY_ADVICE = (Refusal.LIVE, Refusal.HAS_RESPONSE, Refusal.FREE)


def _has_only_lapsed(record: Any) -> bool:
    return objection(record, Act.ALLOW_RETRY, record.now) is Refusal.LAPSED


def _scopes(found: list[tuple[str, Any]]) -> str:
    return ", ".join(printable(record.scope) for _using, record in found)
