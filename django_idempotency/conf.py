"""The ``IDEMPOTENCY`` setting, read live. The only module that reads
``django.conf.settings``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any
from zoneinfo import ZoneInfo

from django.apps import apps
from django.conf import settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_idempotency.values.policy import Atomic, Lease, Policy
from django_idempotency.values.registry import Registry
from django_idempotency.values.rules import (
    BACKENDS,
    MAPPING,
    Kept,
    Options,
    Rule,
    Seconds,
    conform,
    instance_of,
    is_expression,
    listed,
    names_from,
    number,
    option,
    or_callable,
    or_none,
    rules,
    seconds,
    text,
    unknown_names,
)

KEY_LENGTH = 32  # bytes
SHORTEST_TOKEN = 16


def decoded_key(key: object) -> bytes:
    """Return the bytes of a base64 key, in either base64 alphabet; ``b""`` if it is not
    valid base64.
    """
    if isinstance(key, bytes):
        return key
    try:
        return base64.b64decode(
            str(key).encode().translate(bytes.maketrans(b"-_", b"+/")), validate=True
        )
    except ValueError:
        return b""


_EXPRESSIONS = listed(
    "regular expressions", lambda value: isinstance(value, str) and is_expression(value)
)
_PATHS = listed(
    "dotted paths, such as 'shop.consumers.receipts'",
    lambda path: isinstance(path, str) and "." in path,
)
_SHARDS = listed(
    "aliases in DATABASES", lambda alias: isinstance(alias, str) and bool(alias)
)
_MEDIA_TYPES = listed(
    "media types in lower case, such as 'text/csv'",
    lambda kind: (
        isinstance(kind, str)
        and re.fullmatch(r"[a-z0-9.+-]+/[a-z0-9.+-]+", kind) is not None
    ),
)
_TOKENS = listed(
    f"strings of at least {SHORTEST_TOKEN} visible characters each",
    lambda token: (
        isinstance(token, str)
        and re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", token) is not None
    ),
)
_KEYS = listed(
    f"strings, each {KEY_LENGTH} bytes in base64",
    lambda key: isinstance(key, str) and len(decoded_key(key)) == KEY_LENGTH,
)
_KEYS_OR_PROVIDER = or_callable(_KEYS)
SecretKeys = Sequence[str] | Callable[[], Sequence[str | bytes]]


def _provided(name: str, keys: SecretKeys) -> tuple[bytes, ...]:
    """Return the bytes of the keys in a setting, newest first. A callable is called for
    them.

    Raises ``ImproperlyConfigured`` if the callable fails or does not return keys.
    """
    try:
        provided = tuple(map(decoded_key, keys() if callable(keys) else keys))
    except (
        Exception
    ) as error:  # a provider may raise anything; its text may hold a secret
        raise ImproperlyConfigured(
            f"The callable in {name} failed: {type(error).__name__}."
        ) from error
    if callable(keys) and not provided:
        raise ImproperlyConfigured(f"The callable in {name} returned no key.")
    if any(len(key) != KEY_LENGTH for key in provided):
        raise ImproperlyConfigured(
            f"The callable in {name} returned a key that is not {KEY_LENGTH} bytes."
        )
    return provided


# A derived digest key can't be used for decryption.
DERIVED = b"django-idempotency digest"
KEY_ID = 4  # bytes


def digest_key_id(key: bytes) -> bytes:
    """Return an id that distinguishes a digest key from others and reveals nothing
    about it.
    """
    return hashlib.sha256(b"django-idempotency digest key " + key).digest()[:KEY_ID]


# Functions of wings. If one returns true, entry points only watch requests.
suspensions: Registry[Callable[[], bool]] = Registry()


@dataclass(frozen=True, kw_only=True)
class Conf(Options):
    """The settings that no view overrides, and the policy that every view starts from:
    see ``docs/settings.md``.
    """

    enabled: bool = option(True)
    atomic: Atomic = option(Atomic(), instance_of(Atomic))
    lease: Lease = option(Lease(), instance_of(Lease))
    max_waiters: int = option(4, number(0, 1_000_000))
    exempt_paths: Sequence[str] = option((), _EXPRESSIONS)
    problem_type_base_url: str | None = option(
        None, or_none(text("the beginning of a URL"))
    )
    consumers: Sequence[str] = option((), _PATHS)
    instrumentation: Sequence[str] = option(
        (), names_from(("prometheus", "opentelemetry"))
    )
    metrics_tokens: Sequence[str] = option((), _TOKENS, secret=True)
    limits_cache: str = option("default", text("an alias in CACHES"))
    sweep_batch: int = option(1000, number(1, 1_000_000))
    sweep_pause: Kept[Seconds, float] = option(0.5, seconds(0))
    decisions: Sequence[str] = option((), names_from(("note", "second_operator")))
    resolve_content_types: Sequence[str] = option(
        ("application/json", "text/plain"), _MEDIA_TYPES
    )
    shards: Sequence[str] = option((), _SHARDS)
    encryption_keys: SecretKeys = option((), _KEYS_OR_PROVIDER, secret=True)
    digest_keys: SecretKeys = option((), _KEYS_OR_PROVIDER, secret=True)
    stores: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict, repr=False, metadata={"rule": BACKENDS}
    )
    policy: Policy = field(default_factory=Policy)
    # of apps, by the names in ``idempotency_setting`` of their ``AppConfig``
    of_apps: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "policy", self.complete(self.policy))

    def complete(self, policy: Policy) -> Policy:
        """Return ``policy`` over the project's, with the mode that its word means."""
        policy = policy.over(self.policy)
        mode: Any = policy.stated.get("mode", "atomic")
        meant = (
            self.lease if mode == "lease" or isinstance(mode, Lease) else self.atomic
        )
        return policy.derive(mode=meant if isinstance(mode, str) else mode.over(meant))

    @cached_property
    def protects(self) -> bool:
        return self.enabled and not any(suspended() for suspended in suspensions)

    @cached_property
    def encryption(self) -> tuple[bytes, ...]:
        return _provided("ENCRYPTION_KEYS", self.encryption_keys)

    @cached_property
    def digests(self) -> Mapping[bytes, bytes]:
        """The digest keys by their ids, newest first: those that are set, then those
        derived from encryption keys.

        Because of the derived keys, digests made before a digest key was set remain
        comparable.
        """
        derived = (hmac.digest(key, DERIVED, "sha256") for key in self.encryption)
        return {digest_key_id(key): key for key in (*self.own_digest_keys, *derived)}

    @cached_property
    def own_digest_keys(self) -> tuple[bytes, ...]:
        return _provided("DIGEST_KEYS", self.digest_keys)

    @cached_property
    def exempt(self) -> re.Pattern[str] | None:
        return (
            re.compile("|".join(f"(?:{path})" for path in self.exempt_paths))
            if self.exempt_paths
            else None
        )


GLOBAL_NAMES = frozenset(rules(Conf))
NAMES = frozenset(name.upper() for name in GLOBAL_NAMES | rules(Policy).keys())


@lru_cache(maxsize=1)
def conf() -> Conf:
    """Return the settings in force.

    Raises ``ImproperlyConfigured``; for an unknown name, the message suggests the
    nearest valid one.
    """
    stated = getattr(settings, "IDEMPOTENCY", {})
    if not isinstance(stated, Mapping):
        raise ImproperlyConfigured(f"IDEMPOTENCY is {stated!r}; it must be a dict.")
    of_apps = {
        name: stated[name]
        for app in apps.app_configs.values()
        if (name := str(getattr(app, "idempotency_setting", ""))) in stated
    }
    stated = {name: value for name, value in stated.items() if name not in of_apps}
    options = _read("IDEMPOTENCY", stated, Policy, Conf)
    general = {name: options.pop(name) for name in GLOBAL_NAMES & options.keys()}
    return Conf(**general, policy=Policy(**options), of_apps=of_apps)


@lru_cache(maxsize=16)
def options_of_app(name: str, options: type[Any]) -> Any:
    """Return the entry ``name`` of the setting, which is the ``idempotency_setting`` of
    an ``AppConfig``, as an instance of ``options``, which inherits ``Options``.

    Raises ``ImproperlyConfigured``. For an unknown name, its message gives the nearest
    valid one.
    """
    where = f'IDEMPOTENCY["{name}"]'
    stated = conform(where, conf().of_apps.get(name, {}), MAPPING)
    return options(**_read(where, stated, options))


def _read(where: str, stated: Mapping[str, Any], *groups: type[Any]) -> dict[str, Any]:
    """Return the options in a setting, with callables in place of their paths. Their
    classes convert them.
    """
    known = {
        each.name.upper(): each
        for group in groups
        for each in fields(group)
        if "rule" in each.metadata
    }
    if wrong := unknown_names(stated, known):
        hint = ""
        if any(isinstance(value, Mapping) for value in stated.values()):
            hint = " Is an app that reads it missing from INSTALLED_APPS?"
        raise ImproperlyConfigured(f"{where}: {' '.join(wrong)}{hint}")
    read = {}
    for name, value in stated.items():
        setting, rule = f'{where}["{name}"]', known[name].metadata["rule"]
        read[name.lower()] = value = _imported(setting, value, rule)
        conform(setting, value, rule, secret=not known[name].repr)
    return read


def _imported(setting: str, value: Any, rule: Rule) -> Any:
    if isinstance(value, Options):
        parts = rules(type(value))
        return value.derive(
            **{
                name: _imported(f"{setting}.{name}", part, parts[name])
                for name, part in value.stated.items()
            }
        )
    if not (rule.may_be_path and isinstance(value, str) and "." in value):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(
            f"{setting} is {value!r}, which can't be imported: {error}."
        ) from error


@lru_cache(maxsize=1024)
def resolve(policy: Policy) -> Policy:
    """Return a view's policy, completed by the project's policy."""
    return conf().complete(policy)


@lru_cache(maxsize=1)
def debug() -> bool:
    return bool(settings.DEBUG)


def in_test_run() -> bool:
    """Whether Django's test environment is set up, which shows in ``mail.outbox``."""
    return hasattr(mail, "outbox")


@lru_cache(maxsize=1)
def max_fields() -> int | None:
    """Return how many fields Django accepts in a query or a form; ``None`` for no
    limit.
    """
    most: int | None = settings.DATA_UPLOAD_MAX_NUMBER_FIELDS
    return most


@lru_cache(maxsize=1)
def max_body_in_memory() -> int | None:
    """Return how many bytes of a body Django keeps in memory; ``None`` for no limit."""
    most: int | None = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    return most


def of_project(name: str, default: Any = None) -> Any:
    """Return a setting of Django, or of another app."""
    return getattr(settings, name, default)


def flat_names() -> set[str]:
    """Return the names of options that are set beside ``IDEMPOTENCY``, not in it."""
    return {name for name in NAMES if hasattr(settings, f"IDEMPOTENCY_{name}")}


def cors_lacks(setting: str, header: str) -> bool:
    """Whether a setting of django-cors-headers lists headers without this one."""
    listed = getattr(settings, setting, None)
    if listed is None:
        listed = getattr(import_string("corsheaders.conf.conf"), setting)
    return header.lower() not in map(str.lower, listed)


def ambiguous_zone() -> str | None:
    """Return the project's zone if times are stored without one, and it repeats an hour
    in autumn.
    """
    if settings.USE_TZ:
        return None
    year = (datetime(2026, month, 1, tzinfo=UTC) for month in (1, 4, 7, 10))
    zone = ZoneInfo(settings.TIME_ZONE)
    return settings.TIME_ZONE if len({zone.utcoffset(at) for at in year}) > 1 else None


def _forget(*, setting: str, **_named: object) -> None:
    for read in (debug, max_fields, max_body_in_memory):
        read.cache_clear()
    if setting in ("IDEMPOTENCY", "INSTALLED_APPS"):
        conf.cache_clear()
        resolve.cache_clear()
        options_of_app.cache_clear()


setting_changed.connect(_forget)
