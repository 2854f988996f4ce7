"""What a response or an exception means for its record."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase
from django.utils.translation import gettext_noop

from django_idempotency.engine import Run
from django_idempotency.http.responses import is_refusal, stored
from django_idempotency.values.outcomes import (
    Fail,
    Keep,
    Release,
    StoredResponse,
    Verdict,
)
from django_idempotency.values.policy import Policy


def verdict_for(
    response: StoredResponse,
    policy: Policy,
    *,
    terminal: bool = False,
    rollback: bool = False,
) -> Verdict:
    """Return what a response means for its record.

    ``terminal``: it is that of a ``TerminalFailure``, which undoes the effects and is
    stored whatever the policy. ``rollback``: without a key, the effects would have been
    undone.
    """
    status = response.status
    if status in policy.release_statuses and not terminal:
        return Release(rollback=rollback or policy.mode.on_release == "rollback")
    if status in policy.retry_statuses and not terminal:
        return Fail(f"status {status}")
    if rollback and status < 400:  # an exception that is answered as a success
        return Release(rollback=True)
    return Keep(response, failure=status >= 400, rollback=rollback or terminal)


def verdict_on(error: Exception, policy: Policy, *, rollback: bool = False) -> Verdict:
    """Return what an exception means for the record if Django, not the view, turns it
    into a response.

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
        return Release(rollback=rollback or policy.mode.on_release == "rollback")
    return Fail(type(error).__name__)


def verdict_of(
    run: Run, response: Any, *, terminal: bool = False, rollback: bool = False
) -> Verdict:
    """Render what a view has returned, and return what it means. ``terminal``,
    ``rollback``: as for ``verdict_for``.

    Raises what rendering raises. The effects have happened by then, so ``run.verdict``
    is set.
    """
    if not isinstance(response, HttpResponseBase):
        raise TypeError(
            f"The view returned {type(response).__name__}, not an HttpResponse: there"
            " is no response to store. Apply the entry point where there is one"
            " (outside the code that turns a result into a response)."
        )
    # of another entry point inside the view, whose operation is not done
    if is_refusal(response):
        return Fail(gettext_noop("refused inside"))
    verdict = partial(
        verdict_for, policy=run.policy, terminal=terminal, rollback=rollback
    )
    if not getattr(response, "is_rendered", True):
        try:
            response.render()  # type: ignore[attr-defined]
        except BaseException:
            run.verdict = verdict(StoredResponse(response.status_code, body=None))
            raise
    return verdict(stored(response, run.policy))
