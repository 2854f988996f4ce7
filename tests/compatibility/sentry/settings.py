from __future__ import annotations

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.transport import Transport

from tests.compatibility.settings import *

SENT: list[Envelope] = []


class KeepingTransport(Transport):
    """In place of the network."""

    def capture_envelope(self, envelope: Envelope) -> None:
        SENT.append(envelope)


sentry_sdk.init(
    dsn="http://key@127.0.0.1/1",
    transport=KeepingTransport,
    integrations=[
        DjangoIntegration(cache_spans=True, middleware_spans=True, signals_spans=True)
    ],
    traces_sample_rate=1.0,
)
