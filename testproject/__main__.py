"""``python -m testproject <command>``: the project's ``manage.py``."""

from __future__ import annotations

import os
import sys

from django.core.management import execute_from_command_line

from testproject.interrupts import end_on_signals

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")

if __name__ == "__main__":
    end_on_signals()
    try:
        execute_from_command_line(["python -m testproject", *sys.argv[1:]])
    except KeyboardInterrupt:
        sys.exit(130)
