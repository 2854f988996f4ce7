"""Our statements alone, sent as this package sends them: no fingerprint, no signal, nothing of the engine."""

from __future__ import annotations

from typing import Any, Literal
from uuid import uuid4

from testproject.benchmarks.contenders import Contender


def alone(claim: Literal["record", "lock"]) -> Contender:
    def protect(view: Any) -> Any:
        from django.db.transaction import non_atomic_requests
        from django.http import HttpRequest, HttpResponse
        from django.views.decorators.csrf import csrf_exempt

        from django_idempotency.stores import database_store
        from django_idempotency.stores.base import Seen
        from django_idempotency.values.outcomes import Claimed, Operation, StoredResponse
        from django_idempotency.values.policy import Atomic, Policy

        plain, store = view.as_view(), database_store(Policy(mode=Atomic(claim=claim)))

        @csrf_exempt
        @non_atomic_requests
        def respond(request: HttpRequest) -> HttpResponse:
            operation = Operation("caller", request.headers["Idempotency-Key"], b"f" * 32, "POST", request.path)
            found = store.claim(operation, uuid4())
            if isinstance(found, Seen):
                assert found.record.response is not None
                first = store.decode(found.record.response, found.record)
                return HttpResponse(first.body, status=first.status, headers=dict(first.headers))
            assert isinstance(found, Claimed)
            business = store.transaction(found if found.by_lock else None)
            if not found.by_lock:
                business.begin()
                locked = store.lock(found)
                assert locked is not None
                found = locked
            response: HttpResponse = plain(request).render()
            business.end_with_next_write()
            store.complete(found, StoredResponse(response.status_code, tuple(response.items()), response.content))
            business.commit()
            return response

        return respond

    return Contender(title=f"our statements alone, by {claim}", apps=["django_idempotency"], protect=protect)
