"""Celery's workers, as processes of their own."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.db import connections

from django_idempotency.values import scopes
from tests.support.databases import environment
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def start_worker(
    django_db_setup, rabbitmq_url, tmp_path_factory
) -> Iterator[Callable[..., Worker]]:
    """Start a worker for the test database, on a queue of its own or on ``queue``;
    stopped after these tests.

    ``settings``: Django's, which differ. ``more``: variables of its environment.
    """
    given = environment() | {
        "CELERY_BROKER_URL": rabbitmq_url,
        "DJANGO_SETTINGS_MODULE": "tests.messages.worker_settings",
    }
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "testproject.celery",
        "worker",
        "-l",
        "INFO",
        "-c",
        "1",
    ]
    command += [
        "-I",
        "tests.messages.tasks",
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]
    with ExitStack() as stack:

        def start(
            queue: str | None = None,
            settings: dict[str, Any] | None = None,
            **more: str,
        ) -> Worker:
            more["WORKER_SETTINGS"] = json.dumps(settings or {})
            name = str(uuid4())
            log_file = tmp_path_factory.mktemp("worker") / "log"
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    [*command, "-n", f"{name}@tests", "-Q", queue or name],
                    **{
                        "cwd": ROOT,
                        "env": given | more,
                        "stdout": log,
                        "stderr": log,
                    },
                    start_new_session=True,
                )
            worker = Worker(queue or name, process, log_file)
            stack.callback(_delete_queue, rabbitmq_url, worker.queue)
            stack.callback(lambda: process.poll() is None and worker.kill())
            eventually(
                lambda: " ready." in worker.log() or process.poll() is not None,
                within=180,
            )
            assert process.poll() is None, worker.log()
            return worker

        yield start


def _delete_queue(rabbitmq_url: str, queue: str) -> None:
    from celery import Celery  # an extra

    with (
        Celery(broker=rabbitmq_url, set_as_current=False).connection() as broker,
        broker.channel() as channel,
    ):
        channel.queue_delete(queue)


@pytest.fixture(scope="module")
def worker(start_worker) -> Worker:
    """One for the tests that do it no harm."""
    return start_worker()


@pytest.fixture
def send(transactional_db, request) -> Iterator[Callable[..., str]]:
    """Send a task to a worker: ``send(worker, task, *args, **options)``; its id is
    returned.

    By RabbitMQ, or by Redis in tests that are marked so.
    """
    get_user_model().objects.create_user("carol")
    from celery import Celery  # an extra

    broker = request.getfixturevalue(
        "redis_url" if request.node.get_closest_marker("redis") else "rabbitmq_url"
    )
    with Celery(broker=broker, set_as_current=False) as producer:

        def send(
            worker: Worker,
            task: Any,
            *args: Any,
            task_id: str | None = None,
            **options: Any,
        ) -> str:
            task_id = task_id or str(uuid4())
            options = {
                "queue": worker.queue,
                "ignore_result": True,
                "task_id": task_id,
                **options,
            }
            producer.send_task(task.name, args=args, **options)
            return task_id

        yield send


@pytest.fixture
def start_consumer(
    transactional_db: None,
) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start ``idempotency_consume`` for a runner, on the test database; killed after
    the test.
    """
    with ExitStack() as stack:

        def start(path: str, *arguments: str, **more: str) -> subprocess.Popen[bytes]:
            command = [
                sys.executable,
                "-m",
                "django",
                "idempotency_consume",
                path,
                *arguments,
            ]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment() | more, stdout=subprocess.PIPE
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


class Worker:
    """A Celery worker, with its one child process, in a process group of its own."""

    def __init__(
        self, queue: str, process: subprocess.Popen[bytes], log_file: Path
    ) -> None:
        self.queue, self.process, self.log_file = queue, process, log_file

    def log(self) -> str:
        """Its lines, without one that is not yet written to its end."""
        return "".join(self.log_file.read_text(errors="replace").rpartition("\n")[:2])

    def returned(self, task_id: str) -> list[Any]:
        """What each delivery of the task came to here."""
        return [
            ast.literal_eval(found)
            for found in re.findall(rf"{task_id}\] succeeded in \S+: (.*)", self.log())
        ]

    def told(self, task_id: str) -> list[str]:
        """How each delivery of the task ended here: what was returned, raised or said
        of it.
        """
        return re.findall(rf"{task_id}\] (?:succeeded in \S+: |)(.*)", self.log())

    def stop(self) -> None:
        """SIGTERM to the worker, which ends when its child has."""
        self.process.terminate()
        self.process.wait(120)

    def kill(self) -> None:
        """SIGKILL to the worker and its child."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_child(self) -> None:
        """SIGKILL to the process that runs the task alone."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")

        def kill() -> bool:
            """The next child may not have been started yet, nor the last one reaped."""
            for child in children.read_text().split()[:1]:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
                    return True
            return False

        eventually(kill)


@pytest.fixture
def enter_tenant(monkeypatch) -> Iterator[Callable[[str], None]]:
    """Have the connection be in a tenant's schema, as django-tenants does."""

    def enter(schema: str) -> None:
        scopes.has_schemas.cache_clear()
        monkeypatch.setattr(
            connections["default"], "schema_name", schema, raising=False
        )

    yield enter
    monkeypatch.undo()
    scopes.has_schemas.cache_clear()
