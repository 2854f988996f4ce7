"""The signal of a request that was watched."""

from __future__ import annotations

from django.dispatch import Signal

request_observed = Signal()  # keyed, comparable, refused, unprotected; with OBSERVE
