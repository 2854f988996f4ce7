"""An MCP server for agents: ``python -m testproject agents`` speaks the protocol on
stdin and stdout.

A client starts the process for the one user that ``AGENT_USER`` names, so that user is
the scope of the keys.
"""

from __future__ import annotations

import os

from django.contrib.auth import get_user_model
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel

from django_idempotency.contrib.mcp import idempotent_tool
from testproject.models import LedgerEntry

server = MCPServer("payments")


class Charge(BaseModel):
    id: str
    amount: int
    currency: str


def username(context: Context | None = None) -> str:
    return os.environ.get("AGENT_USER", "alice")


@server.tool()
@idempotent_tool(scope=username)
def charge(amount: int, currency: str, reference: str) -> Charge:
    """Charge the user. Send a key of your own as `idempotencyKey` in `_meta`, and the
    same one with every retry.
    """
    user = get_user_model().objects.get(username=username())
    kind = LedgerEntry.Kind.CHARGE
    entry = LedgerEntry.objects.create(
        kind=kind, user=user, amount=amount, currency=currency, reference=reference
    )
    return Charge(id=str(entry.id), amount=amount, currency=currency)
