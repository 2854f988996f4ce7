"""The lanes of a relay: an even share among the live relays, for as long as the relay
renews its lease.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from uuid import UUID, uuid4

from django.db import DatabaseError, connections
from django.db.models import Exists, OuterRef, QuerySet

from django_idempotency.contrib.outbox.models import LANES, Lane, Relay
from django_idempotency.extending import cause, log
from django_idempotency.extending.stores import DatabaseNow, ahead

RENEWALS_A_LEASE = 3


class Lanes:
    """The lanes that this relay holds. Its ``id`` is the fencing token, and is new each
    time the relay joins.

    If a relay does not renew its lease in time, another relay removes it, and its lanes
    are free. The removed relay finds out by ``are_ours``, which counts from before the
    renewal began and so is never true for too long.
    """

    def __init__(self, publisher: str, using: str, lease: float) -> None:
        self.publisher = publisher
        self.using = using
        self.lease = lease
        self.id: UUID = uuid4()
        self.numbers: set[int] = set()
        self._ours_until = 0.0
        self._busy_until = 0.0
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    # --- Joining and leaving ----------------------------------------------------------

    def join(self) -> None:
        """Become one of the relays, with a new id and no lanes yet."""
        self.leave()
        self.id, self._left = uuid4(), threading.Event()
        if self._lanes.count() < LANES:
            lanes = [
                Lane(publisher=self.publisher, number=number) for number in range(LANES)
            ]
            Lane.objects.using(self.using).bulk_create(lanes, ignore_conflicts=True)
        begun = time.monotonic()
        self._relays.create(
            id=self.id, publisher=self.publisher, lease_until=ahead(self.lease)
        )
        self._ours_until = begun + self.lease
        self.expect_progress(0)
        self._thread = threading.Thread(
            target=self._renew_until_left, args=(self.id, self._left), daemon=True
        )
        self._thread.start()

    def leave(self) -> None:
        """Free the lanes, and stop renewing the lease."""
        self._left.set()
        self._ours_until = 0.0
        self.numbers = set()
        if self._thread is not None:
            self._thread.join(self.lease)
            self._thread = None
            self._lanes.filter(relay_id=self.id).update(relay_id=None)
            self._relays.filter(pk=self.id).delete()

    @property
    def are_ours(self) -> bool:
        """Whether no other relay can hold these lanes yet."""
        return time.monotonic() < self._ours_until

    def expect_progress(self, seconds: float) -> None:
        """Go on renewing for ``seconds`` and one lease more. A relay that hangs longer
        loses its lanes.
        """
        self._busy_until = time.monotonic() + seconds + self.lease

    # --- Renewing ---------------------------------------------------------------------

    def _renew_until_left(self, relay: UUID, left: threading.Event) -> None:
        try:
            while not left.wait(self.lease / RENEWALS_A_LEASE):
                if time.monotonic() < self._busy_until and not self._try_to_renew(
                    relay
                ):
                    return
        finally:
            connections[self.using].close()

    def _try_to_renew(self, relay: UUID) -> bool:
        begun = time.monotonic()
        try:
            renewed = self._relays.filter(pk=relay).update(
                lease_until=ahead(self.lease)
            )
        except DatabaseError as error:
            log(
                logging.WARNING,
                "outbox_renewal",
                "outbox: the relay's lease was not renewed: %s",
                cause(error),
            )
            connections[self.using].close()
            return True  # there is time left for another attempt
        if relay == self.id:
            self._ours_until = begun + self.lease if renewed else 0.0
        return bool(renewed)

    # --- Sharing ----------------------------------------------------------------------

    def share(self) -> None:
        """Take or give back lanes, for an even share. Call it while none of the relay's
        events is under way.
        """
        self._relays.filter(lease_until__lt=DatabaseNow()).delete()
        ours = self._lanes.filter(relay_id=self.id)
        self.numbers = _numbers(ours)
        excess = len(self.numbers) - -(-LANES // max(1, self._relays.count()))
        if excess > 0:
            ours.filter(number__in=random.sample(sorted(self.numbers), excess)).update(
                relay_id=None
            )
        elif excess < 0:
            free = self._lanes.filter(
                ~Exists(Relay.objects.using(self.using).filter(pk=OuterRef("relay_id")))
            )
            wanted = sorted(_numbers(free))
            chosen = random.sample(wanted, min(-excess, len(wanted)))
            # only those that no other relay took first
            free.filter(number__in=chosen).update(relay_id=self.id)
        if excess:
            self.numbers = _numbers(ours)

    @property
    def _lanes(self) -> QuerySet[Lane]:
        return Lane.objects.using(self.using).filter(publisher=self.publisher)

    @property
    def _relays(self) -> QuerySet[Relay]:
        return Relay.objects.using(self.using).filter(publisher=self.publisher)


def _numbers(lanes: QuerySet[Lane]) -> set[int]:
    return set(lanes.values_list("number", flat=True))
