from __future__ import annotations

from contextlib import suppress

from django.apps import AppConfig, apps


class OpenAPIConfig(AppConfig):
    name = "django_idempotency.contrib.openapi"
    label = "django_idempotency_openapi"

    def ready(self) -> None:
        if apps.is_installed("drf_spectacular"):
            from django_idempotency.contrib.openapi import extension

            extension.describe_operations()
        # without Django Ninja; a build tool is called ninja too
        with suppress(ImportError):
            from django_idempotency.contrib.openapi import ninja

            ninja.describe_operations()
