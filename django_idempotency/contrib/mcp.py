"""Tools of MCP servers, with the official SDK: a repeated call gets the result of the first one."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, overload
from urllib.parse import quote

from anyio import CancelScope
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections
from django.utils.translation import override
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, authenticated_principal
from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
from mcp_types import CallToolResult, InputRequiredResult, TextContent
from pydantic import PydanticUserError, TypeAdapter

from django_idempotency.conf import conf, resolve
from django_idempotency.messages.attempt import current_context
from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import (
    Ack,
    AwaitsOperator,
    Delivery,
    Exhausted,
    InFlightElsewhere,
    MarkedFailed,
    Message,
    Refused,
    RetryLater,
)
from django_idempotency.messages.results import JSON, NOT_KEPT, PLAIN_JSON
from django_idempotency.values.exceptions import (
    AnonymousKey,
    MalformedKey,
    MissingKey,
    StoreUnavailable,
)
from django_idempotency.values.outcomes import (
    InFlight,
    Mismatch,
    OnHold,
    Release,
    Verdict,
)
from django_idempotency.values.policy import Policy, is_async
from django_idempotency.values.problems import (
    MARKED_FAILED,
    NOT_STORED,
    Problem,
    problem,
)
from django_idempotency.values.scopes import CUSTOM

P = ParamSpec("P")
R = TypeVar("R")
Scope = Callable[[Context[Any, Any]], str | None]

META_KEY = "idempotencyKey"
PUBLIC: Literal["public"] = "public"
MAX_ATTEMPTS = 1_000_000  # the client knows when to give up
CONTEXT = "mcp_context"
OTHER_CALL = "The tool or its arguments differ. Send a retry exactly as it was first sent; use a new key only for another call."
USED = "_django_idempotency_key_used"


@overload
def idempotent_tool(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def idempotent_tool(
    *, scope: Scope | Literal["public"] | None = None, policy: Policy | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def idempotent_tool(
    function: Any = None,
    /,
    *,
    scope: Scope | Literal["public"] | None = None,
    policy: Policy | None = None,
) -> Any:
    """Run a tool once for each key: ``@server.tool()`` above ``@idempotent_tool``.

    The key is ``idempotencyKey`` in the ``_meta`` of ``tools/call``. A call without a key runs unprotected, unless the
    policy has ``required=True``.

    ``scope``: whose key it is. A callable gets the SDK's ``Context`` and returns the tenant or user, or ``None`` if
    there is none. ``"public"`` is one scope for all callers. The default is the client, issuer and subject of the
    access token.

    An exception in the tool rolls its effects back and is passed to the SDK as usual. A retry then runs the tool again;
    ``RejectMessage`` is remembered. A call that is neither run nor replayed returns a result with ``isError`` that says
    whether to retry. Outside a request, the tool just runs.

    A coroutine function needs a policy in lease mode. Raises ``ImproperlyConfigured`` otherwise, or if the tool has no
    name.
    """
    if function is None:
        return partial(idempotent_tool, scope=scope, policy=policy)
    if not hasattr(function, "__qualname__"):
        raise ImproperlyConfigured(
            f"{function!r} has no name to distinguish its keys by; define a function that calls it."
        )
    tool = _Tool(function, scope, policy or Policy())
    if is_async(function) and resolve(tool.policy).is_atomic:
        raise ImproperlyConfigured(
            f'{function!r} is async and in atomic mode; set mode="lease" for it.'
        )
    run = _arun(tool) if is_async(function) else _run(tool)
    if (
        tool.context_name is None
    ):  # the SDK passes the context to a parameter with its type
        run.__annotations__ = {**function.__annotations__, CONTEXT: Context}
    run.idempotent = True  # type: ignore[attr-defined]
    return run


def _run(tool: _Tool) -> Callable[..., Any]:
    @wraps(tool.function)
    def run(*args: Any, **kwargs: Any) -> Any:
        asked = tool.asked(kwargs)
        if not isinstance(asked, Message):
            return asked or tool.function(*args, **kwargs)
        consumer = tool.consumer(
            lambda _message, _context: tool.function(*args, **kwargs)
        )
        return _returned(consumer.consume_in_thread(asked))

    return run


def _arun(tool: _Tool) -> Callable[..., Any]:
    @wraps(tool.function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        asked = tool.asked(kwargs)
        if not isinstance(asked, Message):
            return asked or await tool.function(*args, **kwargs)

        async def handle(_message: Message, _context: Any) -> Any:
            return await tool.function(*args, **kwargs)

        with CancelScope(
            shield=True
        ):  # a client that gives up cancels its call; its retry should find the result
            await sync_to_async(close_old_connections)()
            return _returned(await tool.consumer(handle).aconsume(asked))

    return run


# --- Which call this is ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Tool:
    """A tool's function, and what tells its calls apart."""

    function: Callable[..., Any]
    scope: Scope | Literal["public"] | None
    policy: Policy

    @property
    def name(self) -> str:
        named: Any = self.function
        return f"{named.__module__}.{named.__qualname__}"

    @cached_property
    def context_name(self) -> str | None:
        """The name of the function's parameter for the SDK's context, if it has one."""
        return find_context_parameter(self.function)

    @cached_property
    def codec(self) -> _Codec:
        return _Codec(inspect.signature(self.function, eval_str=True).return_annotation)

    def consumer(self, handler: Callable[..., Any]) -> Consumer:
        return _ToolConsumer(
            "mcp",
            handler,
            policy=self.policy,
            max_attempts=MAX_ATTEMPTS,
            codec=self.codec,
            sender=self.function,
        )

    def asked(self, kwargs: dict[str, Any]) -> Message | CallToolResult | None:
        """Return the call as a message, or the result that refuses it, or ``None`` if the function just runs.

        Removes the context from ``kwargs`` if the function has no parameter for it.
        """
        context = (
            kwargs.get(self.context_name)
            if self.context_name
            else kwargs.pop(CONTEXT, None)
        )
        request = _request(context)
        # A task that a run starts may make requests of its own.
        is_part_of_a_run = current_context() is not None and hasattr(request, USED)
        if context is None or request is None or is_part_of_a_run:
            return None
        meta = request.meta or {}
        key = meta.get(META_KEY)
        if key is None:
            return (
                _refused(problem(MissingKey()))
                if resolve(self.policy).required
                else None
            )
        if not isinstance(key, str) or not key:
            return _refused(
                problem(
                    MalformedKey(
                        f"{META_KEY} must be a non-empty string.", never_used=True
                    )
                )
            )
        scope = self._scope(context)
        if scope is None:
            return _refused(problem(AnonymousKey()))
        self._take(request)
        params = request.params or {}
        body = json.dumps([params.get("name"), params.get("arguments") or {}]).encode()
        return Message(f"{scope}/{self.name}", key, body)

    def _scope(self, context: Context[Any, Any]) -> str | None:
        if self.scope == PUBLIC:
            return PUBLIC
        if self.scope is not None:
            own = self.scope(context)
            return f"{CUSTOM}{quote(own, safe='')}" if own else None
        token = get_access_token()
        if (
            token is not None and not token.subject
        ):  # to the SDK, all users of this client would be one principal
            return None
        principal = authenticated_principal(context.request_context)
        return None if principal is None else quote(principal, safe='[",]')

    def _take(self, request: Any) -> None:
        """Use the key for one tool only. Tools that another tool calls get its request, and so each other's results."""
        if hasattr(request, USED):
            raise ImproperlyConfigured(
                f"{self.name} is the second protected tool that runs for one call. Protect the tool that calls it."
            )
        setattr(request, USED, True)


def _request(context: Context[Any, Any] | None) -> Any:
    """Return what the SDK knows of the request that ``context`` belongs to, or ``None`` outside a request."""
    try:
        return context and context.request_context
    except ValueError:
        return None


# --- The run ---------------------------------------------------------------------------------------------------------


class _ToolConsumer(Consumer):
    """Leaves exceptions to the SDK."""

    def verdict_on_result(self, result: Any) -> Verdict | None:
        """Release the key if the tool asks for input: the next round may come under the same key."""
        return (
            Release(rollback=True) if isinstance(result, InputRequiredResult) else None
        )

    def after(self, error: Exception, attempt: int, limit: int) -> NoReturn:
        raise error


def _returned(delivery: Delivery) -> Any:
    match delivery:
        case Ack(result):
            return _refused(NOT_STORED) if result is NOT_KEPT else result
        case Refused(reason=reason) | Exhausted(reason=reason):
            return _error(reason)
        case InFlightElsewhere(delay):
            return _refused(problem(InFlight(math.ceil(delay))))
        case AwaitsOperator(reason=reason):
            return _refused(problem(OnHold(reason)))
        case RetryLater(reason=reason):
            return _refused(problem(StoreUnavailable(reason)))
        case MarkedFailed(reason):
            return _refused(replace(MARKED_FAILED, detail=reason))
    return _refused(replace(problem(Mismatch()), detail=OTHER_CALL))


def _refused(why: Problem) -> CallToolResult:
    """Return a result that says the same to a model (in its text) and to a program (in its ``_meta``)."""
    with override(None):  # all parts in one language, whatever the server's is
        members = why.members(conf().problem_type_base_url) | (
            {} if why.retry_after is None else {"retry_after": why.retry_after}
        )
    detail = (
        members["detail"].rstrip(".") + "."
    )  # an operator may have written it without a full stop
    return _error(f"{members['title']} {detail} {_advice(why)}", problem=members)


def _advice(why: Problem) -> str:
    if why.retryable:
        wait = "" if why.retry_after is None else f" in {why.retry_after} s"
        return f"Retry{wait} with the same key only."
    return "A new key is safe." if why.safe_new_key else "Do not repeat this call."


def _error(text: str, **meta: Any) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=text)], is_error=True, _meta=meta or None
    )


# --- Results ---------------------------------------------------------------------------------------------------------


class _Codec:
    """Keeps results by the function's return annotation if pydantic can, else as plain JSON."""

    content_type = JSON

    def __init__(self, annotation: Any) -> None:
        self.adapter: TypeAdapter[Any] | None = None
        if annotation is not inspect.Signature.empty:
            with suppress(
                PydanticUserError, TypeError
            ):  # pydantic does not know the type
                self.adapter = TypeAdapter(annotation)

    def encode(self, result: Any) -> bytes:
        if self.adapter is None:
            return PLAIN_JSON.encode(result)
        body = self.adapter.dump_json(
            result, by_alias=False, round_trip=True, warnings="error"
        )
        if self.decode(body) != result:
            raise TypeError(
                f"A result of type {type(result).__qualname__} would change in replays; annotate its type."
            )
        return body

    def decode(self, body: bytes) -> Any:
        if self.adapter is None:
            return PLAIN_JSON.decode(body)
        return self.adapter.validate_json(
            body, by_alias=False, by_name=True
        )  # whatever aliases a model has
