"""Somebody who follows the quickstart in an empty directory, and does what its blocks
say.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager

import pytest
from django.db import connection

from tests.support.databases import create_database, drop_database
from tests.support.pages import FENCE, ROOT, text
from tests.support.private_servers import free_port
from tests.support.waiting import eventually


class Reader:
    """Does what the page says, in an empty directory. ``python`` finds the package at
    ``path``, or by itself.
    """

    def __init__(self, directory, python=sys.executable, path=str(ROOT)):
        self.directory = directory
        self.python = python
        self.port = free_port()
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "DJANGO_SETTINGS_MODULE"
        }
        self.environment = inherited | {"PYTHONPATH": path, "NO_PROXY": "127.0.0.1"}
        self.functions = ""
        self.databases: list[str] = []
        self.replaced: dict[str, str] = {}
        self.warnings = "error"
        self.server = None
        self.shown = 0

    def write(self, block):
        path, _, where = block.partition("\n")[0].removeprefix("# ").partition(", ")
        file = self.directory / path
        for written, meant in self.replaced.items():
            block = block.replace(written, meant)
        file.write_text((file.read_text() if where else "") + block)

    def type(self, block):
        for command, _, output in (
            part.partition("\n")
            for part in block.strip().removeprefix("$ ").split("\n$ ")
        ):
            program, *arguments = shlex.split(command)
            match program, arguments:
                case (("curl" | "order" | "pay"), _):
                    self.expect(self.shell(command), output)
                case (("token()" | "order()" | "pay()"), _):
                    self.functions += f"{command}\n"
                case "python", [manage, "runserver"]:
                    self.serve(manage)
                case "python", _:
                    self.run(*arguments)
                case "django-admin", _:
                    self.run("-m", "django", *arguments)
                case "pip", ["install", *_]:
                    pass  # it is what runs here
                case "export", [assignment]:
                    self.environment |= [assignment.split("=")]
                case "createdb", [name]:
                    self.databases.append(name)
                case _:
                    pytest.fail(f"Nobody knows how to type {command!r}.")

    def run(self, *arguments):
        done = subprocess.run(
            [self.python, "-W", self.warnings, *arguments],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def serve(self, manage):
        self.stop_serving()
        self.server = subprocess.Popen(
            [self.python, manage, "runserver", "--noreload", str(self.port)],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self.is_serving, within=120)

    def stop_serving(self):
        if self.server:
            self.server.terminate()
            self.server.wait(60)

    def is_serving(self):
        assert self.server.poll() is None, "the server has ended"
        return self.curl("-i", "http://127.0.0.1:8000/")

    def curl(self, *arguments):
        return self.shell(shlex.join(["curl", *arguments]))

    def shell(self, command):
        script = f"{self.functions}{command}".replace(":8000", f":{self.port}")
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout

    def expect(self, answer, lines):
        for line in lines.splitlines():
            # Pythons differ in the words for 422.
            line = re.sub(r"^(HTTP/1.1 \d+) .*", r"\1", line)
            assert line in answer, f"{line!r} is not in:\n{answer}"
            self.shown += 1


@contextmanager
def reader(directory, **found):
    someone = Reader(directory, **found)
    try:
        yield someone
    finally:
        someone.stop_serving()


def follow_the_quickstart(someone, page="quickstart.md"):
    for language, block in FENCE.findall(text(page)):
        {"python": someone.write, "console": someone.type}[language](block)
    assert someone.shown > 8


@contextmanager
def reader_with_postgresql(directory, **found):
    """A reader who has a PostgreSQL server, and makes a database there that has another
    name than on the page.
    """
    server, name = connection.settings_dict, f"{connection.settings_dict['NAME']}_shop"
    libpq = {
        "PGHOST": server["HOST"],
        "PGPORT": server["PORT"],
        "PGUSER": server["USER"],
    }
    create_database(name, directory)
    try:
        with reader(directory, **found) as someone:
            someone.environment |= {
                variable: str(value) for variable, value in libpq.items() if value
            }
            someone.environment |= (
                {"PGPASSWORD": server["PASSWORD"]} if server["PASSWORD"] else {}
            )
            someone.replaced = {'"NAME": "shop"': f'"NAME": "{name}"'}
            yield someone
    finally:
        drop_database(name)
