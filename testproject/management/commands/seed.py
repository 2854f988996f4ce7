from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand
from rest_framework.authtoken.models import Token


class Command(BaseCommand):
    help = (
        "Create alice and bob with their tokens, and the superuser admin/admin. Run it"
        " as often as you like."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        User = get_user_model()
        for name in ("alice", "bob"):
            user, _created = User.objects.get_or_create(username=name)
            Token.objects.get_or_create(user=user, defaults={"key": f"{name}-token"})
        if not User.objects.filter(username="admin").exists():
            User.objects.create_superuser("admin", "admin@example.com", "admin")
        if options["verbosity"]:
            self.stdout.write("Seeded: alice-token, bob-token, admin/admin.")
