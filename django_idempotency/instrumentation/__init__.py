"""Metrics and traces for monitoring: an adapter for each system, all with the metrics
that ``metrics`` defines.
"""

from __future__ import annotations

from importlib import import_module

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.conf import conf


def install() -> None:
    """Install the adapters that the setting ``INSTRUMENTATION`` names, once for the
    process.

    Raises ``ImproperlyConfigured`` if a library is missing. An invalid setting is left
    to the system checks.
    """
    try:
        names = conf().instrumentation
    except (ImproperlyConfigured, TypeError):
        return
    for name in names:
        try:
            adapter = import_module(f"{__name__}.{name}")
        except ImportError as error:
            raise ImproperlyConfigured(
                f"INSTRUMENTATION names {name!r}, which needs its extra: pip install"
                f' "django-idempotency[{name}]".'
            ) from error
        adapter.install()
