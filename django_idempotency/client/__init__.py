"""For Python clients of an API with idempotency keys: one key for each call, and retries that are safe.

``client.httpx`` has transports, ``client.requests`` an adapter. Neither needs Django, nor settings.
"""

from __future__ import annotations

from django_idempotency.client.retries import Retries

__all__ = ["Retries"]
