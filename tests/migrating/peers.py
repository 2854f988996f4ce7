"""The other packages, each as its own documentation shows it: alone, around ours, and
ours alone.
"""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from django.apps import apps
from django.core.cache import caches
from rest_framework.request import Request
from rest_framework.response import Response

from django_idempotency.rest_framework import IdempotentMixin
from django_idempotency.values.policy import Policy
from tests.migrating.payments import Payments, pay, protected

View = Callable[..., Any]


OURS = {"idempotency_policy": Policy(required=True)}


def ours() -> View:
    return protected(IdempotentMixin, **OURS)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``protect`` makes the view as the package protects it, with further mixins and
    attributes of the view inside.

    ``records`` returns all that it has stored, as texts. ``settings`` are its own,
    ``switch`` what is added to them while ours is inside.
    """

    distribution: str
    protect: Callable[..., View]
    records: Callable[[], list[str]]
    middleware: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    switch: Mapping[str, Any] = field(default_factory=dict)

    def alone(self) -> View:
        return self.protect()

    def around(self) -> View:
        return self.protect(IdempotentMixin, **OURS)


def _by_decorator(*mixins: type, **attributes: Any) -> View:
    from idempotency_key.decorators import idempotency_key

    return idempotency_key(protected(*mixins, **attributes))  # type: ignore[no-any-return]


def _by_mixin(*mixins: type, **attributes: Any) -> View:
    from drf_idempotencykey.mixins import DrfIdempotencyKeyMixin

    return protected(
        DrfIdempotencyKeyMixin, *mixins, require_idempotency_key=True, **attributes
    )


def _by_method(*mixins: type, **attributes: Any) -> View:
    from rest_framework_idempotency_key.decorators import simple_idempotency_key_method

    class Decorated(*mixins, Payments):  # type: ignore[misc]
        @simple_idempotency_key_method
        def post(self, request: Request) -> Response:
            return pay(request)

    return Decorated.as_view(**attributes)  # type: ignore[no-any-return]


@cache
def _idemkit_backend() -> Any:
    from idemkit.backends import InMemoryBackend

    return InMemoryBackend()  # shared by the processes that there would be


def _by_idemkit(*mixins: type, **attributes: Any) -> View:
    from idemkit import HttpConfig
    from idemkit.contrib.drf import idempotent_view

    config = HttpConfig(
        scope=lambda request: str(request.user.pk),
        require_key_for_mutations=True,
        # 10 by default; only how long the test takes depends on it
        wait_timeout_seconds=0.2,
    )
    return protected(
        idempotent_view(backend=_idemkit_backend(), config=config),
        *mixins,
        **attributes,
    )


def _idemkit_records() -> list[str]:
    return [
        f"{key} {vars(record)}" for key, record in _idemkit_backend()._records.items()
    ]


def _rows(model: str) -> list[str]:
    return [
        str(sorted(row.items())) + str(row)
        for row in map(_readable, apps.get_model(model).objects.values())
    ]


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """With what is stored as Base64 decoded."""
    body = row.get("response_body") or ""
    return row | (
        {} if body.startswith("{") or not body else {"response_body": b64decode(body)}
    )


def _cached() -> list[str]:
    return [
        f"{name} {pickle.loads(value)}"
        for name, value in caches["default"]._cache.items()
    ]


PEERS = {
    peer.distribution: peer
    for peer in (
        Peer(
            distribution="django-idempotency-key",
            protect=_by_decorator,
            records=_cached,
            middleware=("idempotency_key.middleware.ExemptIdempotencyKeyMiddleware",),
        ),
        Peer(
            distribution="drf-idempotency",
            protect=protected,
            records=partial(_rows, "drf_idempotency.IdempotencyRecord"),
            middleware=("drf_idempotency.middleware.IdempotencyMiddleware",),
            settings={"DRF_IDEMPOTENCY": {"REQUIRE_KEY": True}},
            switch={
                "DRF_IDEMPOTENCY": {
                    "REQUIRE_KEY": True,
                    "CACHE_CLIENT_ERROR_RESPONSES": False,
                }
            },
        ),
        Peer(
            distribution="drf-idempotencykey",
            protect=_by_mixin,
            records=partial(_rows, "drf_idempotencykey.IdempotencyKey"),
        ),
        Peer(
            distribution="djangorestframework-idempotency-key",
            protect=_by_method,
            records=partial(_rows, "rest_framework_idempotency_key.IdempotencyKey"),
            middleware=(
                "rest_framework_idempotency_key.middleware.IdempotencyKeyMiddleware",
            ),
        ),
        Peer(
            distribution="idemkit",
            protect=_by_idemkit,
            records=_idemkit_records,
        ),
    )
}
