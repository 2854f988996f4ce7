"""The ``IDEMPOTENCY`` setting, read live. The only module that looks at ``django.conf.settings``."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

from django.conf import settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_idempotency import policy
from django_idempotency.policy import Policy

INSTRUMENTATION = ("prometheus", "opentelemetry")
HEADER_NAME = re.compile(r"[A-Za-z0-9-]+")


@dataclass(frozen=True, kw_only=True)
class Conf:
    """The settings that no view overrides, and the policy that every view starts from.

    ``header``: the request header that carries the key.
    ``exempt_paths``: regular expressions; the middleware leaves paths that match one alone.
    ``problem_base``: what the ``type`` and ``Link`` of our problem answers start with; the code is appended.
    ``sent_header``: the request header that says when the request was first sent, for ``late_after``.
    ``instrumentation``: where metrics go, ``"prometheus"`` or ``"opentelemetry"`` or both; heeded at start alone.
    ``trace_record_id``: whether spans name the record, whose id is a digest of scope and key.
    ``reap_batch``, ``cleanup_batch``: records that maintenance takes in one transaction.
    ``cleanup_pause``: seconds that cleaning up pauses between two of them.
    ``encryption_keys``: for ``encrypt``, the newest first; each 32 bytes in base64.
    ``tally``: seconds that counts of what happened are kept, for the dashboard; ``None`` counts nothing.
    """

    header: str = "Idempotency-Key"
    exempt_paths: Sequence[str] = ()
    problem_base: str = "https://django-idempotency.readthedocs.io/en/stable/errors/#"
    sent_header: str | None = None
    instrumentation: Sequence[str] = ()
    trace_record_id: bool = False
    reap_batch: int = 500
    cleanup_batch: int = 1000
    cleanup_pause: float = 0.5
    tally: float | None = 8 * 24 * 60 * 60
    encryption_keys: Sequence[str] = field(default=(), repr=False)
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        if not (isinstance(self.header, str) and HEADER_NAME.fullmatch(self.header)):
            raise ImproperlyConfigured(f"HEADER is {self.header!r}; it must be the name of a header.")
        if not (
            self.sent_header is None or (isinstance(self.sent_header, str) and HEADER_NAME.fullmatch(self.sent_header))
        ):
            raise ImproperlyConfigured(
                f"SENT_HEADER is {self.sent_header!r}; it must be the name of a header, or None."
            )
        if not isinstance(self.problem_base, str):
            raise ImproperlyConfigured(f"PROBLEM_BASE is {self.problem_base!r}; it must be the beginning of a URL.")
        if not (
            isinstance(self.exempt_paths, list | tuple) and all(isinstance(path, str) for path in self.exempt_paths)
        ):
            raise ImproperlyConfigured(f"EXEMPT_PATHS is {self.exempt_paths!r}; it must be a list of strings.")
        if not isinstance(self.instrumentation, list | tuple):
            raise ImproperlyConfigured(f"INSTRUMENTATION is {self.instrumentation!r}; it must be a list of names.")
        for name in self.instrumentation:
            if name not in INSTRUMENTATION:
                raise ImproperlyConfigured(f"INSTRUMENTATION names {name!r}: {policy.nearest(name, INSTRUMENTATION)}")
        if not isinstance(self.trace_record_id, bool):
            raise ImproperlyConfigured(f"TRACE_RECORD_ID is {self.trace_record_id!r}; it must be True or False.")
        try:
            _ = self.exempt
        except re.error as error:
            raise ImproperlyConfigured(f"EXEMPT_PATHS: {error.pattern!r} is no regular expression: {error}.") from error
        for name, smallest in (("reap_batch", 1), ("cleanup_batch", 1), ("cleanup_pause", 0)):
            value = getattr(self, name)
            if not _is_number(value, smallest, 1_000_000):
                raise ImproperlyConfigured(f"{name.upper()} is {value!r}; it must be a number from {smallest}.")
        if self.tally is not None and not _is_number(self.tally, 1, policy.LONGEST):
            raise ImproperlyConfigured(f"TALLY is {self.tally!r}; it must be a number of seconds, or None.")
        if isinstance(self.encryption_keys, str) or not isinstance(self.encryption_keys, Sequence):
            raise ImproperlyConfigured("ENCRYPTION_KEYS must be a list of strings.")
        _ = self.encryption

    @cached_property
    def encryption(self) -> tuple[bytes, ...]:
        return tuple(_key(number, text) for number, text in enumerate(self.encryption_keys))

    @cached_property
    def meta_name(self) -> str:
        return _meta_name(self.header)

    @cached_property
    def sent_meta_name(self) -> str | None:
        return self.sent_header and _meta_name(self.sent_header)

    @cached_property
    def exempt(self) -> re.Pattern[str] | None:
        return re.compile("|".join(f"(?:{path})" for path in self.exempt_paths)) if self.exempt_paths else None


def _is_number(value: object, smallest: float, largest: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and smallest <= value <= largest


def _key(number: int, text: object) -> bytes:
    try:
        key = base64.b64decode(text.encode().translate(bytes.maketrans(b"-_", b"+/")), validate=True)  # type: ignore[attr-defined]
    except (AttributeError, ValueError):
        key = b""
    if len(key) != 32:  # and no word of what it is
        raise ImproperlyConfigured(f"ENCRYPTION_KEYS[{number}] must be 32 bytes in base64.") from None
    return key


def _meta_name(header: str) -> str:
    return "HTTP_" + header.upper().replace("-", "_")


GLOBAL_NAMES = frozenset(field.name for field in fields(Conf)) - {"policy"}
NAMES = frozenset(name.upper() for name in GLOBAL_NAMES | policy.NAMES)


def stated() -> dict[str, Any]:
    """The ``IDEMPOTENCY`` setting as it stands in the project's settings."""
    return getattr(settings, "IDEMPOTENCY", {})


def errors() -> list[str]:
    """A sentence for each name in ``IDEMPOTENCY`` that means nothing."""
    return policy.unknown_names(stated(), NAMES)


@lru_cache(maxsize=1)
def conf() -> Conf:
    """The settings in force.

    Raises ``ImproperlyConfigured`` that names the nearest right name for an unknown one.
    """
    if not isinstance(stated(), Mapping):
        raise ImproperlyConfigured(f"IDEMPOTENCY is {stated()!r}; it must be a dict.")
    if wrong := errors():
        raise ImproperlyConfigured("IDEMPOTENCY: " + " ".join(wrong))
    options = {name.lower(): value for name, value in stated().items()}
    general = {name: options.pop(name) for name in list(options) if name in GLOBAL_NAMES}
    return Conf(**general, policy=Policy(**options))


@lru_cache(maxsize=1024)
def resolve(policy: Policy) -> Policy:
    """A view's policy over the project's."""
    return policy.over(conf().policy)


def debug() -> bool:
    return bool(settings.DEBUG)


def in_test_run() -> bool:
    """Whether Django's test environment is set up, by its outbox."""
    return hasattr(mail, "outbox")


def middleware() -> list[str]:
    return list(settings.MIDDLEWARE)


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        conf.cache_clear()
        resolve.cache_clear()


setting_changed.connect(_forget)
