"""Tools of servers by fastmcp, which passes its context in its own way."""

from __future__ import annotations

import pytest

from django_idempotency.contrib.mcp import ANNOTATIONS, META_KEYS, idempotent_tool
from django_idempotency.values.policy import Policy
from tests.support.callers import all_effects as effects
from tests.support.callers import pay
from tests.support.loops import run as in_a_loop

pytestmark = [
    pytest.mark.fastmcp,
    pytest.mark.usefixtures("transactional_db", "payer"),
]


def charge(amount: int) -> str:
    return f"{amount}: {pay().id.hex}"


def test_a_tool_of_fastmcp_runs_once_for_each_key():
    from fastmcp import Client, FastMCP

    server = FastMCP("payments")
    required = Policy(required=True)
    server.tool(
        idempotent_tool(scope="public", policy=required)(charge),
        annotations=ANNOTATIONS,
    )

    async def main():
        async with Client(server) as client:

            async def call(amount, meta):
                return await client.call_tool(
                    "charge", {"amount": amount}, meta=meta, raise_on_error=False
                )

            (tool,) = await client.list_tools()
            same = [await call(5, {name: "k"}) for name in META_KEYS]
            other, without = await call(6, {META_KEYS[0]: "k"}), await call(5, None)
            return tool, same, other, without

    tool, same, other, without = in_a_loop(main)
    assert tool.annotations.idempotent_hint is True
    assert list(tool.input_schema["properties"]) == ["amount"]
    assert len({result.data for result in same}) == effects() == 1
    for refused, code in ((other, "reused"), (without, "missing")):
        assert refused.is_error
        assert refused.meta["problem"]["code"] == f"idempotency_key_{code}"
