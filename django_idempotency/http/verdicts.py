"""What a response or an exception means for its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.translation import gettext_noop

from django_idempotency.engine import Execution
from django_idempotency.exceptions import TerminalFailure
from django_idempotency.http.problems import is_refusal
from django_idempotency.http.responses import stored
from django_idempotency.outcomes import Fail, Keep, Release, StoredResponse, Verdict
from django_idempotency.policy import OnRelease, Policy


def verdict_for(
    status: int,
    policy: Policy,
    response: Callable[[], StoredResponse],
    *,
    terminal: bool = False,
) -> Verdict:
    """Return what a status means for its record.

    ``terminal``: it is that of a ``TerminalFailure``, which undoes the effects and is stored whatever the policy.
    """
    if status in policy.release_statuses and not terminal:
        return Release(rollback=policy.on_release == OnRelease.ROLLBACK)
    if status in policy.retry_statuses and not terminal:
        return Fail(f"status {status}")
    return Keep(response(), failure=status >= 400, rollback=terminal)


def verdict_on(error: Exception, policy: Policy, *, rollback: bool = False) -> Verdict:
    """Return what an exception means for the record if Django, not the view, turns it into a response.

    ``rollback``: without a key, the exception would have undone the effects.
    """
    match error:
        case Http404():
            status = 404
        case PermissionDenied():
            status = 403
        case BadRequest() | SuspiciousOperation() | MultiPartParserError():
            status = 400
        case _:
            status = 500
    if status in policy.release_statuses:
        return Release(rollback=rollback or policy.on_release == OnRelease.ROLLBACK)
    return Fail(type(error).__name__)


def settle(execution: Execution, response: HttpResponseBase, *, error: Exception | None = None) -> None:
    """Render the response and settle on what it means. ``error``: the exception that it stands for, if any.

    Raises what rendering raises. The effects have happened by then.
    """
    _expect_response(response)
    if is_refusal(response):  # of another entry point inside the view, whose operation is not done
        execution.settle(Fail(gettext_noop("refused inside")))
        return
    status, policy = response.status_code, execution.policy
    terminal = isinstance(error, TerminalFailure)
    if not getattr(response, "is_rendered", True):
        execution.settle(verdict_for(status, policy, lambda: StoredResponse(status, body=None), terminal=terminal))
        response.render()  # type: ignore[attr-defined]
    execution.settle(verdict_for(status, policy, lambda: stored(response, policy, status=status), terminal=terminal))


def _expect_response(response: Any) -> None:
    if not isinstance(response, HttpResponseBase):
        raise TypeError(
            f"The view returned {type(response).__name__}, not an HttpResponse: there is no response to store. Apply "
            "the entry point where there is one (outside whatever turns a result into a response)."
        )
