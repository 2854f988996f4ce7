"""Tools of MCP servers, called by the official SDK's client: in memory, over HTTP, and
in a process that is killed.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import httpx2
import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    CallToolRequest,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    TextContent,
)
from pydantic import BaseModel

from django_idempotency import current, engine
from django_idempotency.contrib.mcp import idempotent_tool
from django_idempotency.maintenance import fail
from django_idempotency.messages import RejectMessage
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import OnHold
from django_idempotency.values.policy import Body, Policy
from tests.support.callers import Gate, pay
from tests.support.callers import all_effects as effects
from tests.support.databases import environment
from tests.support.loops import run as in_a_loop
from tests.support.waiting import wait_for_row_locks

pytestmark = [pytest.mark.mcp, pytest.mark.usefixtures("transactional_db", "payer")]
ROOT = Path(__file__).parents[3]


def charge(amount: int, currency: str = "EUR") -> str:
    """Charge once."""
    return f"{amount} {currency}: {pay().id.hex}"


def serving(*tools: Any) -> MCPServer:
    server = MCPServer("payments")
    for tool in tools:
        server.add_tool(tool)
    return server


def public(function: Any, **policy: Any) -> Any:
    return idempotent_tool(scope="public", policy=Policy(**policy))(function)


async def call(
    client: Client,
    tool: str = "charge",
    key: Any = "k",
    meta: dict[str, Any] | None = None,
    **arguments: Any,
) -> CallToolResult:
    if meta is None:
        meta = {} if key is None else {"idempotencyKey": key}
    return await client.call_tool(tool, arguments or {"amount": 5}, meta=meta)


def calls(server: MCPServer, *wanted: Any, **options: Any) -> list[CallToolResult]:
    """The results of ``wanted`` calls, one after the other, each a function of the
    client.
    """

    async def main() -> list[CallToolResult]:
        async with Client(server, **options) as client:
            return [await one(client) for one in wanted]

    return in_a_loop(main)


def twice(server: MCPServer, *args: Any, **named: Any) -> list[CallToolResult]:
    return calls(server, *[lambda client: call(client, *args, **named)] * 2)


def code(result: CallToolResult) -> str:
    assert result.is_error, result.meta
    return result.meta["problem"]["code"]


def text(result: CallToolResult) -> str:
    return "".join(block.text for block in result.content)


def gated(gate: Gate) -> MCPServer:
    """A tool that pays once it is let go, in a thread and as a coroutine."""

    def stay(amount: int) -> str:
        return gate(None).content.decode()

    async def astay(amount: int) -> str:
        gate.entered.set()
        await asyncio.to_thread(gate.let_go.wait, 120)
        return await sync_to_async(charge)(amount)

    return serving(public(stay), public(astay, mode="lease"))


def test_a_decorated_tool_looks_as_it_did():
    async def listed(function):
        async with Client(serving(function)) as client:
            return (await client.list_tools()).tools

    assert in_a_loop(lambda: listed(public(charge))) == in_a_loop(
        lambda: listed(charge)
    )


def test_a_call_without_a_key_is_not_protected():
    drawn = iter(range(9))

    def draw(amount: int) -> int:
        return next(drawn)

    assert [
        text(result) for result in twice(serving(public(draw)), "draw", key=None)
    ] == ["0", "1"]


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({}, "missing"),
        ({"idempotencyKey": ""}, "malformed"),
        ({"idempotencyKey": 7}, "malformed"),
        ({"idempotencyKey": ["k"]}, "malformed"),
        ({"idempotency-key": ""}, "malformed"),
        ({"idempotencyKey": "k", "idempotency_key": "another"}, "malformed"),
    ],
)
def test_a_tool_call_without_a_usable_key_is_refused(meta, wanted):
    server = serving(public(charge, required=wanted == "missing"))
    refused, _again = twice(server, meta=meta)
    assert (code(refused), effects()) == (f"idempotency_key_{wanted}", 0)


def test_a_key_that_is_null_is_malformed(monkeypatch):
    """The SDK's client does not send it, others do."""
    dump = CallToolRequest.model_dump

    def with_null(request, **options):
        data = dump(request, **options)
        data["params"].setdefault("_meta", {})["idempotencyKey"] = None
        return data

    monkeypatch.setattr(CallToolRequest, "model_dump", with_null)
    refused, _again = twice(serving(public(charge)), meta={})
    assert (code(refused), effects()) == ("idempotency_key_malformed", 0)


def test_a_key_is_for_one_tool_and_for_one_set_of_arguments():
    def refund(amount: int) -> str:
        return charge(-amount)

    server = serving(public(charge), public(refund))
    _first, refused, refunded = calls(
        server,
        call,
        lambda client: call(client, amount=6),
        lambda client: call(client, "refund"),
    )
    assert (code(refused), "Do not repeat this call." in text(refused)) == (
        "idempotency_key_reused",
        True,
    )
    assert (refunded.is_error, effects()) == (False, 2)


def test_duplicates_at_once_have_one_effect():
    gate = Gate()

    async def main():
        async with Client(gated(gate)) as client:
            first = asyncio.ensure_future(call(client, "stay"))
            assert await asyncio.to_thread(gate.entered.wait, 60)
            refused = await asyncio.gather(
                *(call(client, "stay") for _duplicate in range(4))
            )
            gate.let_go.set()
            return refused, [
                await first,
                *[await call(client, "stay") for _retry in range(4)],
            ]

    refused, results = in_a_loop(main)
    assert {code(one) for one in refused} == {"idempotency_key_in_use"}
    assert all(
        one.meta["problem"]["retryable"] and one.meta["problem"]["retry_after"] >= 1
        for one in refused
    )
    assert all(
        re.search(r"Retry in [1-9] s with the same key only\.$", text(one))
        for one in refused
    )
    assert len({text(result) for result in results}) == 1
    assert effects() == 1


@pytest.mark.parametrize("tool", ["stay", "astay"])
def test_a_call_that_its_client_has_given_up_has_a_result_for_the_retry(tool):
    gate = Gate()

    async def main():
        async with Client(gated(gate), mode="legacy") as client, asyncio.timeout(120):

            def given_up(seconds):
                meta = {"idempotencyKey": "k"}
                return client.call_tool(tool, {"amount": 5}, seconds, meta=meta)

            with pytest.raises(MCPError, match=r"[Tt]imed out"):
                await given_up(0.5)
            # on a busy machine it may not have begun, and was cancelled or is late
            while not await asyncio.to_thread(gate.entered.wait, 1):
                with suppress(MCPError):
                    await given_up(5)
            gate.let_go.set()
            while (result := await call(client, tool)).is_error:
                await asyncio.sleep(0.02)
            return result, await call(client, tool)

    first, again = in_a_loop(main)
    assert (first, effects()) == (again, 1)


def test_a_tenant_can_be_found_in_the_context():
    tenants = iter(["acme", "umbrella", "acme"])
    scoped = idempotent_tool(
        scope=lambda context: f"{next(tenants)}/{context.mcp_server.name}"
    )(charge)
    acme, umbrella, again = calls(serving(scoped), call, call, call)
    assert text(acme) == text(again) != text(umbrella)
    scopes = set(IdempotencyRecord.objects.values_list("scope", flat=True))
    assert scopes == {
        f"consumer:mcp:custom:{one}%2Fpayments/{__name__}.charge"
        for one in ("acme", "umbrella")
    }


@pytest.mark.parametrize("scope", [None, lambda context: None, lambda context: ""])
def test_a_key_of_nobody_is_refused(scope):
    refused, _again = twice(serving(idempotent_tool(scope=scope)(charge)))
    assert (code(refused), effects()) == ("idempotency_key_anonymous", 0)


def failing_once(error: BaseException) -> Any:
    failures = [error]

    def fail(amount: int) -> str:
        charged = charge(amount)
        if failures:
            raise failures.pop()
        return charged

    return fail


@pytest.mark.parametrize(
    ("error", "shown"),
    [(LookupError("secret"), ""), (ToolError("too late"), ": too late")],
)
def test_a_tool_that_raises_is_rolled_back_and_a_retry_runs(error, shown):
    server = serving(public(failing_once(error)))
    failed, done, again = calls(server, *[lambda client: call(client, "fail")] * 3)
    assert text(failed) == f"Error executing tool fail{shown}"
    assert not done.is_error
    assert (done, effects()) == (again, 1)


def test_a_rejection_is_remembered():
    server = serving(public(failing_once(RejectMessage("no such account"))))
    first, again = twice(server, "fail")
    assert (first, effects()) == (again, 0)
    assert (text(first), first.is_error) == ("no such account", True)


@pytest.mark.parametrize(
    ("outcome", "wanted", "words"),
    [
        (
            OnHold("its worker died"),
            "idempotency_key_on_hold",
            "under any key. Do not repeat this call.",
        ),
        (
            StoreUnavailable(),
            "idempotency_store_unavailable",
            "with the same key only.",
        ),
    ],
)
def test_a_call_that_can_not_be_run_says_whether_to_retry(
    monkeypatch, outcome, wanted, words
):
    with monkeypatch.context() as patch:
        patch.setattr(engine, "begin", Mock(side_effect=[outcome, outcome]))
        refused, _again = twice(serving(public(charge)))
    assert (code(refused), words in text(refused), effects()) == (wanted, True, 0)
    assert refused.meta["problem"]["retryable"] == isinstance(outcome, StoreUnavailable)


def test_a_call_that_an_operator_marked_as_failed_is_not_run():
    calls(
        serving(public(failing_once(LookupError()))),
        lambda client: call(client, "fail"),
    )
    assert (
        fail(IdempotencyRecord.objects.get().pk, detail="refunded by hand").status
        == Status.FAILED
    )
    refused, _again = twice(serving(public(failing_once(LookupError()))), "fail")
    assert code(refused) == "marked_failed"
    assert "refunded by hand. Do not repeat this call." in text(refused)


class Paid(BaseModel):
    id: str
    amount: Decimal


@dataclass
class Receipt:
    paid: Paid
    tags: set[str]


def paid(amount: int) -> Paid:
    return Paid(id=charge(amount), amount=Decimal("5.00"))


def receipt(amount: int) -> Receipt:
    return Receipt(paid(amount), {"a"})


def blocks(amount: int) -> list[TextContent]:
    return [TextContent(text=charge(amount))]


def mapping(amount: int) -> dict[str, Any]:
    return {"id": charge(amount), "amount": 5.0, "none": None}


def unsaid(amount: int):
    return [charge(amount), amount]


def nothing(amount: int) -> None:
    charge(amount)


def decline(amount: int) -> CallToolResult:
    return CallToolResult(content=[TextContent(text=charge(amount))], is_error=True)


def with_fee(
    amount: int, fee: Annotated[int, Resolve(lambda amount: amount // 5)]
) -> str:
    assert fee == 1, "what the SDK has resolved"
    return charge(amount + fee)


async def acharge(amount: int) -> str:
    assert current()
    return await sync_to_async(charge)(amount)


@pytest.mark.parametrize(
    "tool",
    [
        charge,
        paid,
        receipt,
        blocks,
        mapping,
        unsaid,
        nothing,
        decline,
        with_fee,
        acharge,
    ],
)
def test_a_retry_gets_the_first_result_without_another_effect(tool):
    first, again = twice(
        serving(public(tool, mode="lease" if tool is acharge else "atomic")),
        tool.__name__,
    )
    assert first.is_error == (tool is decline), text(first)
    assert (first, effects()) == (again, 1)


def untyped(amount: int):
    return paid(amount)


def changed(amount: int) -> list:
    return [TextContent(text=charge(amount))]


@pytest.mark.parametrize("tool", [untyped, changed])
def test_a_result_that_could_not_come_back_is_an_error_before_anything_is_committed(
    tool,
):
    refused, _again = twice(serving(public(tool)), tool.__name__)
    assert refused.is_error
    assert effects() == 0


def test_a_result_that_was_too_large_to_keep_is_said_to_be_done():
    first, refused = twice(serving(public(charge, body=Body(limit=10))))
    assert not first.is_error
    assert (code(refused), effects()) == ("response_not_stored", 1)


def test_a_tool_that_asks_the_user_runs_once_it_has_a_reply():
    question = ElicitRequestFormParams(
        message="Sure?", requested_schema={"type": "object", "properties": {}}
    )
    asked = []

    def confirm(amount: int, context: Context) -> str | InputRequiredResult:
        charged = charge(amount)
        if not context.input_responses:
            return InputRequiredResult(
                input_requests={"sure": ElicitRequest(params=question)}
            )
        return charged

    async def answer(_context, params):
        asked.append(params.message)
        return ElicitResult(action="accept", content={})

    first, again = calls(
        serving(public(confirm)),
        *[lambda client: call(client, "confirm")] * 2,
        elicitation_callback=answer,
    )
    assert not first.is_error, text(first)
    assert (first, effects(), asked) == (again, 1, ["Sure?"])


@pytest.mark.parametrize("times", [1, 2])
def test_a_tool_may_call_one_protected_tool_which_has_its_key(times):
    server = serving(public(charge))

    async def outer(context: Context) -> str:
        for _time in range(times):
            await server.call_tool("charge", {"amount": 5}, context)
        return "done"

    server.add_tool(outer)
    assert {result.is_error for result in twice(server, "outer")} == {times > 1}
    assert effects() == 1


def test_a_protected_tool_that_is_called_by_a_protected_one_is_a_part_of_it():
    inner = public(charge)

    def outer(amount: int, context: Context) -> str:
        return inner(amount=amount, mcp_context=context) + inner(amount=amount)

    first, again = twice(serving(public(outer)), "outer")
    assert (first.is_error, first, effects()) == (False, again, 2)


def test_calls_of_a_task_that_a_run_has_started_have_keys_of_their_own():
    inner = serving(public(charge))
    started = []

    async def asking_later():
        async with Client(inner) as client:
            return [await call(client), await call(client)]

    async def outer(amount: int) -> str:
        started.append(asyncio.create_task(asking_later()))
        return "started"

    async def main():
        async with Client(serving(public(outer, mode="lease"))) as client:
            await call(client, "outer")
            return await started[0]

    first, second = in_a_loop(main)
    assert text(first) == text(second)
    assert effects() == 1


@pytest.mark.parametrize(
    ("function", "message"),
    [(partial(charge, currency="EUR"), "no name"), (acharge, 'mode="lease"')],
)
def test_a_function_that_can_not_be_protected_is_refused_at_once(function, message):
    with pytest.raises(ImproperlyConfigured, match=message):
        public(function)


def test_an_error_is_in_one_language(settings):
    def refused():
        return text(
            calls(serving(public(charge)), lambda client: call(client, key=5))[0]
        )

    english = refused()
    settings.LANGUAGE_CODE = "de"
    assert refused() == english


def test_outside_a_request_a_tool_just_runs():
    protected = public(charge)
    assert protected(5) != protected(amount=5)
    assert (effects(), IdempotencyRecord.objects.count()) == (2, 0)


DYING = """
import os, signal, django
django.setup()
from django.db.models.signals import post_save
from testproject.models import LedgerEntry
from testproject.agents import server
def die(**_named):
    os.kill(os.getpid(), signal.SIGKILL)
post_save.connect(die, sender=LedgerEntry)
server.run()
"""
CHARGE = {"amount": 5, "currency": "EUR", "reference": "r-1"}


def process(*arguments: str, **more: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable, args=[*arguments], env=environment() | more, cwd=ROOT
    )


def test_a_server_that_is_killed_in_its_tool_has_charged_once_after_the_retry(
    django_user_model,
):
    django_user_model.objects.create_user("alice")

    async def charged(client):
        return await client.call_tool(
            "charge", CHARGE, 120, meta={"idempotencyKey": "k"}
        )

    async def main():
        async with Client(process("-c", DYING)) as client:
            with pytest.raises(MCPError, match="closed"):
                await charged(client)
        assert await sync_to_async(effects)() == 0
        await sync_to_async(wait_for_row_locks)()
        async with Client(
            process("-m", "testproject", "agents", AGENT_USER="alice")
        ) as client:
            return await charged(client), await charged(client)

    first, again = in_a_loop(main)
    assert not first.is_error, text(first)
    assert (first, effects()) == (again, 1)
    record = IdempotencyRecord.objects.get()
    assert (record.scope, record.attempts) == (
        "consumer:mcp:custom:alice/testproject.agents.charge",
        2,
    )


class Tokens:
    async def verify_token(self, token: str) -> AccessToken | None:
        subject = None if token == "machine" else token
        return AccessToken(token=token, client_id="agent", scopes=[], subject=subject)


@pytest.mark.parametrize(("stateless", "mode"), [(True, "auto"), (False, "legacy")])
def test_over_http_the_access_token_tells_whose_key_it_is(stateless, mode):
    auth = AuthSettings(issuer_url="https://example.com", resource_server_url=None)
    server = MCPServer("payments", token_verifier=Tokens(), auth=auth)
    server.add_tool(idempotent_tool(charge))
    app = server.streamable_http_app(json_response=True, stateless_http=stateless)

    async def charged_by(name):
        headers = {"Authorization": f"Bearer {name}"}
        async with (
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), headers=headers
            ) as http,
            Client(
                streamable_http_client("http://127.0.0.1:8000/mcp", http_client=http),
                mode=mode,
            ) as client,
        ):
            return await call(client)

    async def main():
        async with app.router.lifespan_context(app):
            return [
                await charged_by(name) for name in ("alice", "bob", "alice", "machine")
            ]

    alice, bob, again, nobody = in_a_loop(main)
    assert alice == again != bob
    assert (code(nobody), effects()) == ("idempotency_key_anonymous", 2)
