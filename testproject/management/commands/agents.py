from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand


class Command(BaseCommand):
    help = (
        "Serve the tools of testproject.agents on stdin and stdout, for an MCP client."
        " Needs the mcp extra."
    )

    def handle(self, *args: Any, **options: Any) -> None:
        from testproject.agents import server

        server.run()
