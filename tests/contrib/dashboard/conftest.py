"""Fixtures of the admin and of the instruments."""

from __future__ import annotations

from tests.admin.conftest import no_heartbeat, records, staff, superuser
from tests.instrumentation.conftest import fresh_figures, registry

__all__ = ["fresh_figures", "no_heartbeat", "records", "registry", "staff", "superuser"]
