"""A tool call is a part of its client's trace."""

from __future__ import annotations

import pytest

from tests.messages.test_tracing import PARENT, TRACE, spans
from tests.support.loops import run as in_a_loop

__all__ = ["spans"]


@pytest.mark.mcp
def test_a_tool_call_is_in_the_trace_that_its_client_names(spans):
    from mcp import Client
    from mcp.server.mcpserver import MCPServer

    from django_idempotency.contrib.mcp import idempotent_tool

    @idempotent_tool(scope="public")
    def size(x: int) -> int:
        return abs(x)

    server = MCPServer("tools")
    server.add_tool(size)

    async def main():
        async with Client(server) as client:
            return await client.call_tool("size", {"x": -5}, meta={"idempotencyKey": "k", **PARENT})

    assert not in_a_loop(main).is_error
    (span,) = (span for span in spans() if span.name.startswith("process "))
    assert f"{span.context.trace_id:032x}" == TRACE
