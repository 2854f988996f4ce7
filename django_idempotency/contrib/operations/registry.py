"""The operations that can be deferred, by names that survive moving their code."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.urls import get_resolver

from django_idempotency import IdempotencyError, Policy
from django_idempotency.extending.requests import is_async
from django_idempotency.messages import Backoff

NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
MOST = 2**20  # bytes
MAX_ATTEMPTS = 10
BACKOFF = Backoff()
_by_name: dict[str, Deferrable] = {}


class DeferError(IdempotencyError):
    """The operation can't be deferred as the code is written. The message says what to
    change.
    """


@dataclass(frozen=True, eq=False)
class Deferrable:
    """A function that ``defer`` takes. Calling it calls the function, at once."""

    name: str
    function: Callable[..., Any]
    policy: Policy = field(default_factory=Policy)
    max_attempts: int = MAX_ATTEMPTS
    backoff: Callable[[int], float] = BACKOFF
    status: int = 200

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def dumped(self, arguments: dict[str, Any]) -> bytes:
        """Return ``arguments`` as JSON. Raises ``DeferError`` if the function does not
        take them, or if JSON would change them.
        """
        try:
            inspect.signature(self.function).bind(**arguments)
            text = json.dumps(arguments, allow_nan=False, sort_keys=True).encode()
            if json.loads(text) != arguments:  # a tuple, or keys that are no text
                raise TypeError("JSON would change them")
        except (TypeError, ValueError, RecursionError) as error:
            raise DeferError(
                f"The arguments of {self.name!r} can't be kept: {error}. Pass only"
                " what JSON can hold, such as ids and strings, under the function's"
                " own argument names."
            ) from error
        if len(text) > MOST:
            raise DeferError(
                f"The arguments of {self.name!r} have {len(text)} bytes, but at most"
                f" {MOST} are kept. Save the content, and pass its id."
            )
        return text


def operation(
    name: str,
    *,
    mode: Any = "atomic",
    max_attempts: int = MAX_ATTEMPTS,
    backoff: Callable[[int], float] = BACKOFF,
    status: int = 200,
) -> Callable[[Callable[..., Any]], Deferrable]:
    """Make an operation of a function, which ``defer`` has run once, later.

    ``name``: 1 to 100 letters, digits, dots, hyphens and underscores, different for
    each operation. A deferred operation finds its function by this name, even if the
    function has moved. ``mode``: ``"atomic"`` or ``"lease"``, as for ``@idempotent``.
    ``max_attempts``: afterwards the operation is on hold. ``backoff``: takes the number
    of the failed attempt, and returns the seconds before the next. ``status``: of the
    response that retries of the request get once the operation is done. Its body is
    what the function returned, as JSON.

    Raises ``ImproperlyConfigured`` for a name that is taken or malformed, and for
    a coroutine function.
    """

    def decorate(function: Callable[..., Any]) -> Deferrable:
        taken, path = _by_name.get(name), _path(function)
        if not NAME.fullmatch(name):
            raise ImproperlyConfigured(
                f"@operation({name!r}): use 1 to 100 letters, digits, dots, hyphens or"
                " underscores."
            )
        if taken and _path(taken.function) != path:
            raise ImproperlyConfigured(
                f"@operation({name!r}) is taken by {_path(taken.function)}."
            )
        if is_async(function):
            raise ImproperlyConfigured(
                f"@operation({name!r}): {path} is async. Make it sync."
            )
        policy = Policy(mode=mode)
        made = Deferrable(name, function, policy, max_attempts, backoff, status)
        _by_name[name] = made
        return made

    return decorate


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def find(name: str) -> Deferrable | None:
    """Return the operation of that name, which a view that defers it has imported. A
    worker loads the URLs, and so the views.
    """
    if name not in _by_name:
        _ = get_resolver().url_patterns
    return _by_name.get(name)
