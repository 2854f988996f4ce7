"""``python -m testproject.benchmarks.project.prepare`` creates the tables of ``$CONTENDER``, and the caller."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.core.management import call_command


def main() -> None:
    django.setup()
    expect_code_of_this_directory()
    call_command("migrate", run_syncdb=True, verbosity=0)

    from django.contrib.auth.models import User

    from testproject.benchmarks.project.authentication import CALLER
    from testproject.benchmarks.project.settings import contender

    User.objects.create(pk=CALLER, username="caller")
    contender.prepare()


def expect_code_of_this_directory() -> None:
    """Raise ``SystemExit`` if the imported version of ours is not the one that is to be measured."""
    ours = sys.modules.get("django_idempotency")
    if ours is not None and not str(ours.__file__).startswith(f"{Path.cwd()}/"):
        sys.exit(f"django_idempotency is imported from {ours.__file__}.")


if __name__ == "__main__":
    main()
