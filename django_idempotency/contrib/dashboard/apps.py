from __future__ import annotations

from django.apps import AppConfig, apps
from django.utils.translation import gettext_lazy as _


class DashboardConfig(AppConfig):
    name = "django_idempotency.contrib.dashboard"
    label = "django_idempotency_dashboard"
    verbose_name = _("Idempotency dashboard")
    idempotency_setting = "DASHBOARD"

    def ready(self) -> None:
        from django_idempotency.contrib.dashboard import counters, observations
        from django_idempotency.contrib.dashboard.checks import CHECKS
        from django_idempotency.contrib.dashboard.conf import observes
        from django_idempotency.contrib.dashboard.formatting import recently
        from django_idempotency.extending import register

        register(
            self.label,
            page="observe",
            checks=CHECKS,
            prunes=[counters.prune, observations.prune],
            sections=[recently],
            listeners=[counters.count_event],
            suspensions=[observes],
        )
        if apps.is_installed("django.contrib.admin"):
            from django_idempotency.contrib.dashboard.pages import PAGE

            register(self.label, pages=[PAGE])
