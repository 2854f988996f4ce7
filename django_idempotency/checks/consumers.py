"""Checks of the runners that ``CONSUMERS`` names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register

from django_idempotency import conf
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.consumers.runner import Runner, runner_at
from django_idempotency.policy import Mode, Policy


@register(Tags.compatibility)
def check_consumers(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E043: a runner that can't be made. W044, W045: times that don't fit its broker's. W047: attempts not counted."""
    if not are_usable():
        return []
    return [message for path in conf.conf().consumers for message in _messages(path)]


def _messages(path: str) -> Iterator[CheckMessage]:
    try:
        runner = runner_at(path)
    except Exception as error:  # importing a project's module, or calling its function, may raise anything
        hint = "Use the dotted path of a runner, or of a function that returns one."
        yield Error(f"CONSUMERS names {path}: {error}", hint=hint, id="django_idempotency.E043")
        return
    policy = conf.resolve(runner.consumer.policy or Policy())
    yield from _times(runner, path, policy)
    yield from _attempts(runner, path, policy)


def _times(runner: Runner[Any], path: str, policy: Policy) -> Iterator[CheckMessage]:
    waits = runner.redelivered_after
    if policy.mode == Mode.LEASE and waits is not None and policy.lease >= waits:
        yield Warning(
            f"{path}: its lease of {policy.lease:g} s is not shorter than the {waits:g} s that its broker waits.",
            hint="A dead consumer's messages are redelivered while its lease lasts; shorten the lease.",
            id="django_idempotency.W044",
        )
    if policy.retention < runner.redelivered_for:
        yield Warning(
            f"{path}: it forgets a message after {policy.retention:g} s, but the message can be redelivered for "
            f"{runner.redelivered_for:g} s.",
            hint="Lengthen retention in the consumer's policy, or set the runner's redelivered_for.",
            id="django_idempotency.W045",
        )


def _attempts(runner: Runner[Any], path: str, policy: Policy) -> Iterator[CheckMessage]:
    if policy.claims_by_lock and not runner.tells_redeliveries:
        yield Warning(
            f"{path}: a message that kills its process is never given up.",
            hint="Its broker does not report redeliveries, and claims by lock do not count crashes. Set "
            'claim="record" in the consumer\'s policy.',
            id="django_idempotency.W047",
        )
