"""Our statements alone, sent as this package sends them: no fingerprint, no signal,
nothing of the engine.
"""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

from testproject.benchmarks.contenders import Contender


def alone(claim: Literal["record", "lock"]) -> Contender:
    def protect(view: Any) -> Any:
        from django.db.transaction import non_atomic_requests
        from django.http import HttpResponse

        from django_idempotency.stores import database_store
        from django_idempotency.stores.base import Seen
        from django_idempotency.stores.transactions import Transaction
        from django_idempotency.values.outcomes import (
            Claimed,
            Operation,
            StoredResponse,
        )
        from django_idempotency.values.policy import Atomic, Policy

        store = database_store(Policy(mode=Atomic(claim=claim)))

        class Alone(view):  # type: ignore[misc]
            run: tuple[Claimed, Transaction] | None = None

            def dispatch(self, *args: Any, **kwargs: Any) -> Any:
                response = super().dispatch(*args, **kwargs)
                if self.run is not None:
                    found, business = self.run
                    response.render()
                    stored = StoredResponse(
                        response.status_code, tuple(response.items()), response.content
                    )
                    business.commit_after(
                        lambda send: store.sending_by(send).complete(found, stored)
                    ).expect()
                return response

            def post(self, request: Any) -> Any:
                operation = Operation(
                    "caller",
                    request.headers["Idempotency-Key"],
                    b"f" * 32,
                    "POST",
                    request.path,
                )
                found = store.claim(operation, uuid4())
                if isinstance(found, Seen):
                    assert found.record.response is not None
                    first = store.decode(found.record.response, found.record)
                    return HttpResponse(
                        first.body, status=first.status, headers=dict(first.headers)
                    )
                assert isinstance(found, Claimed)
                business = store.transaction(found if found.by_lock else None)
                if not found.by_lock:
                    business.begin()
                    locked = store.lock(found)
                    assert locked is not None
                    found = locked
                self.run = found, business
                return super().post(request)

        return non_atomic_requests(Alone.as_view())

    return Contender(
        title=f"our statements alone, by {claim}",
        apps=["django_idempotency"],
        protect=protect,
    )
