"""For Python clients of an API with idempotency keys: one key for each call, and safe retries.

``client.httpx`` has transports, and ``client.requests`` has an adapter. Neither needs Django or settings.
"""

from __future__ import annotations

from django_idempotency.contrib.client.retries import Retries

__all__ = ["Retries"]
