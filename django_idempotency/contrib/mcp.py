"""Tools of MCP servers, with the official SDK or fastmcp: a repeated call gets the
result of the first one.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import Any, Literal, ParamSpec, TypeVar, overload
from urllib.parse import quote

from anyio import CancelScope
from asgiref.sync import iscoroutinefunction as is_async
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections
from django.utils.translation import override
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.mcpserver import Context, authenticated_principal
from mcp.server.mcpserver.utilities.context_injection import find_context_parameter
from mcp_types import (
    CallToolResult,
    InputRequiredResult,
    TextContent,
    ToolAnnotations,
)
from pydantic import PydanticUserError, TypeAdapter

from django_idempotency import Message, Policy, Problem, StoreUnavailable, current
from django_idempotency.extending import conf, resolve
from django_idempotency.extending.brokers import PLAIN_JSON, Caller
from django_idempotency.extending.requests import CUSTOM, PROBLEMS, problem
from django_idempotency.extending.stores import (
    InFlight,
    Mismatch,
    OnHold,
    Release,
    Verdict,
)
from django_idempotency.messages import (
    NOT_KEPT,
    Ack,
    AwaitsOperator,
    Consumer,
    Delivery,
    Exhausted,
    InFlightElsewhere,
    MarkedFailed,
    Refused,
    RetryLater,
)

P = ParamSpec("P")
R = TypeVar("R")
Scope = Callable[[Context[Any, Any]], str | None]

META_KEY = "idempotencyKey"
META_KEYS = (META_KEY, "idempotency_key", "idempotency-key")
# for the tool() of a server, above a tool that requires a key
ANNOTATIONS = ToolAnnotations(idempotent_hint=True)
PUBLIC: Literal["public"] = "public"
CONTEXT = "mcp_context"
OTHER_CALL = (
    "The tool or its arguments differ. Send a retry exactly as it was first sent; use a"
    " new key only for another call."
)
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

    The key is ``idempotencyKey`` in the ``_meta`` of ``tools/call``, or
    ``idempotency_key`` or ``idempotency-key`` there. A call without a key runs
    unprotected, unless the policy has ``required=True``.

    ``scope``: whose key it is. A callable gets the SDK's ``Context`` and returns the
    tenant or user, or ``None`` if there is none. ``"public"`` is one scope for all
    callers. The default is the client, issuer and subject of the access token.

    An exception in the tool rolls its effects back and is passed to the SDK as usual. A
    retry then runs the tool again; ``RejectMessage`` is remembered. A call that is
    neither run nor replayed returns a result with ``isError`` that says whether to
    retry. Outside a request, the tool just runs.

    A coroutine function needs a policy in lease mode. Raises ``ImproperlyConfigured``
    otherwise, or if the tool has no name.
    """
    if function is None:
        return partial(idempotent_tool, scope=scope, policy=policy)
    if not hasattr(function, "__qualname__"):
        raise ImproperlyConfigured(
            f"{function!r} has no name to distinguish its keys by; define a function"
            " that calls it."
        )
    tool = _Tool(function, scope, policy or Policy())
    if is_async(function) and resolve(tool.policy).is_atomic:
        raise ImproperlyConfigured(
            f'{function!r} is async and in atomic mode; set mode="lease" for it.'
        )
    run = _arun(tool) if is_async(function) else _run(tool)
    # the SDK passes the context to a parameter with its type
    if tool.context_name is None:
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

        # a client that gives up cancels its call; its retry should find the result
        with CancelScope(shield=True):
            await sync_to_async(close_old_connections)()
            return _returned(await tool.consumer(handle).aconsume(asked))

    return run


# --- Which call this is ---------------------------------------------------------------


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
            codec=self.codec,
            sender=self.function,
        )

    def asked(self, kwargs: dict[str, Any]) -> Message | CallToolResult | None:
        """Return the call as a message, or the result that refuses it, or ``None`` if
        the function just runs.

        Removes the context from ``kwargs`` if the function has no parameter for it.
        """
        context = (
            kwargs.get(self.context_name)
            if self.context_name
            else kwargs.pop(CONTEXT, None) or _context_of_fastmcp()
        )
        request = _request(context)
        # A task that a run starts may make requests of its own.
        is_part_of_a_run = bool(current()) and hasattr(request, USED)
        if context is None or request is None or is_part_of_a_run:
            return None
        params = request.params or {}
        meta = params.get("_meta") or request.meta or {}
        keys = [meta[name] for name in META_KEYS if name in meta]
        if not keys:
            return (
                _refused(PROBLEMS["idempotency_key_missing"])
                if resolve(self.policy).required
                else None
            )
        key = keys[0]
        if not isinstance(key, str) or not key or keys.count(key) < len(keys):
            return _refused(
                replace(
                    PROBLEMS["idempotency_key_malformed"],
                    detail=f"{META_KEY} must be a non-empty string.",
                    safe_new_key=True,
                )
            )
        scope = self._scope(context, request)
        if scope is None:
            return _refused(PROBLEMS["idempotency_key_anonymous"])
        self._take(request)
        body = json.dumps([params.get("name"), params.get("arguments") or {}]).encode()
        return Message(f"{scope}/{self.name}", key, body)

    def _scope(self, context: Context[Any, Any], request: Any) -> str | None:
        if self.scope == PUBLIC:
            return PUBLIC
        if self.scope is not None:
            own = self.scope(context)
            return f"{CUSTOM}{quote(own, safe='')}" if own else None
        token = get_access_token()
        # to the SDK, all users of this client would be one principal
        if token is not None and not token.subject:
            return None
        principal = authenticated_principal(request)
        return None if principal is None else quote(principal, safe='[",]')

    def _take(self, request: Any) -> None:
        """Use the key for one tool only. Tools that another tool calls get its request,
        and so each other's results.
        """
        if hasattr(request, USED):
            raise ImproperlyConfigured(
                f"{self.name} is the second protected tool that runs for one call."
                " Protect the tool that calls it."
            )
        setattr(request, USED, True)


def _request(context: Context[Any, Any] | None) -> Any:
    """Return what the SDK knows of the request that ``context`` belongs to, or ``None``
    outside a request.
    """
    try:
        request = context and context.request_context
    except ValueError:
        return None
    return getattr(request, "_srctx", request)  # fastmcp wraps it


def _context_of_fastmcp() -> Any:
    """Return the context of fastmcp, which does not pass it to our parameter; ``None``
    outside its requests.
    """
    dependencies: Any = sys.modules.get("fastmcp.server.dependencies")
    try:
        return dependencies and dependencies.get_context()
    except RuntimeError:
        return None


# --- The run --------------------------------------------------------------------------


class _ToolConsumer(Caller):
    """Leaves exceptions to the SDK."""

    def verdict_on_result(self, result: Any) -> Verdict | None:
        """Release the key if the tool asks for input: the next round may come under the
        same key.
        """
        return (
            Release(rollback=True) if isinstance(result, InputRequiredResult) else None
        )


def _returned(delivery: Delivery) -> Any:
    match delivery:
        case Ack(result):
            return (
                _refused(PROBLEMS["response_not_stored"])
                if result is NOT_KEPT
                else result
            )
        case Refused(reason=reason) | Exhausted(reason=reason):
            return _error(reason)
        case InFlightElsewhere(delay):
            return _refused(problem(InFlight(math.ceil(delay))))
        case AwaitsOperator(reason=reason):
            return _refused(problem(OnHold(reason)))
        case RetryLater(reason=reason):
            return _refused(problem(StoreUnavailable(reason)))
        case MarkedFailed(reason):
            return _refused(replace(PROBLEMS["marked_failed"], detail=reason))
    return _refused(replace(problem(Mismatch()), detail=OTHER_CALL))


def _refused(why: Problem) -> CallToolResult:
    """Return a result that says the same to a model (in its text) and to a program (in
    its ``_meta``).
    """
    with override(None):  # all parts in one language, whatever the server's is
        members = why.members(conf().problem_type_base_url) | (
            {} if why.retry_after is None else {"retry_after": why.retry_after}
        )
        text = f"{why.title} {why.detail}".strip()
    # an operator may have written it without a full stop
    return _error(f"{text.rstrip('.')}. {_advice(why)}", problem=members)


def _advice(why: Problem) -> str:
    if why.retryable:
        wait = "" if why.retry_after is None else f" in {why.retry_after} s"
        return f"Retry{wait} with the same key only."
    return "A new key is safe." if why.safe_new_key else "Do not repeat this call."


def _error(text: str, **meta: Any) -> CallToolResult:
    return CallToolResult(
        content=[TextContent(text=text)], is_error=True, _meta=meta or None
    )


# --- Results --------------------------------------------------------------------------


class _Codec:
    """Keeps results by the function's return annotation if pydantic can, else as plain
    JSON.
    """

    content_type = PLAIN_JSON.content_type

    def __init__(self, annotation: Any) -> None:
        self.adapter: TypeAdapter[Any] | None = None
        if annotation is not inspect.Signature.empty:
            # pydantic does not know the type
            with suppress(PydanticUserError, TypeError):
                self.adapter = TypeAdapter(annotation)

    def encode(self, result: Any) -> bytes:
        if self.adapter is None:
            return PLAIN_JSON.encode(result)
        body = self.adapter.dump_json(
            result, by_alias=False, round_trip=True, warnings="error"
        )
        if self.decode(body) != result:
            raise TypeError(
                f"A result of type {type(result).__qualname__} would change in replays;"
                " annotate its type."
            )
        return body

    def decode(self, body: bytes) -> Any:
        if self.adapter is None:
            return PLAIN_JSON.decode(body)
        # whatever aliases a model has
        return self.adapter.validate_json(body, by_alias=False, by_name=True)
