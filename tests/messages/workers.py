"""A Celery worker as a process of its own."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any


class Worker:
    """A Celery worker, with its one child process, in a process group of its own."""

    def __init__(self, queue: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.queue, self.process, self.log_file = queue, process, log_file

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def returned(self, task_id: str) -> list[Any]:
        """What each delivery of the task came to here."""
        return [ast.literal_eval(found) for found in re.findall(rf"{task_id}\] succeeded in \S+: (.*)", self.log())]

    def told(self, task_id: str) -> list[str]:
        """How each delivery of the task ended here: what was returned, raised or said of it."""
        return re.findall(rf"{task_id}\] (?:succeeded in \S+: |)(.*)", self.log())

    def stop(self) -> None:
        """SIGTERM to the worker, which ends when its child has."""
        self.process.terminate()
        self.process.wait(30)

    def kill(self) -> None:
        """SIGKILL to the worker and its child."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_child(self) -> None:
        """SIGKILL to the process that runs the task alone."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
