"""``python -m testproject.benchmarks.project.prepare`` creates the tables of
``$CONTENDER``, and the caller.
"""

from __future__ import annotations

import django
from django.core.management import call_command


def main() -> None:
    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)

    from django.contrib.auth.models import User

    from testproject.benchmarks.project.authentication import CALLER
    from testproject.benchmarks.project.settings import contender

    User.objects.create(pk=CALLER, username="caller")
    contender.prepare()


if __name__ == "__main__":
    main()
