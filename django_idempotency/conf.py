"""The ``IDEMPOTENCY`` setting, read live. The only module that reads ``django.conf.settings``."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, cast

from django.conf import settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_idempotency.policy import Policy
from django_idempotency.values.option_groups import Atomic, Body, Lease, Seconds
from django_idempotency.values.options import (
    BACKENDS,
    BOOLEAN,
    MAPPING,
    CallableRule,
    Kept,
    Rule,
    an,
    conform,
    is_expression,
    listed,
    names_from,
    number,
    option,
    or_none,
    rules,
    seconds,
    text,
    unknown_names,
    validate,
)

KEY_LENGTH = 32  # bytes
SHORTEST_TOKEN = 16


def decoded_key(key: object) -> bytes:
    """Return the bytes of a base64 key, in either base64 alphabet; ``b""`` if it is not valid base64."""
    if isinstance(key, bytes):
        return key
    try:
        return base64.b64decode(str(key).encode().translate(bytes.maketrans(b"-_", b"+/")), validate=True)
    except ValueError:
        return b""


PRINTED = ("q7m0bq3Z0bQ2S3o0b1l1Z0b1c2d3e4f5g6h7i8j9k0E=", "mB0X4nZk2f8s1yq0m3o5V7t9h2a4c6e8g1i3k5l7n9Q=")
EXAMPLES = frozenset(map(decoded_key, PRINTED))  # of keys, in the documentation


_HEADER = text("the name of a header, such as 'Idempotency-Key'", re.compile(r"[A-Za-z0-9-]+").fullmatch)
_EXPRESSIONS = listed("regular expressions", lambda value: isinstance(value, str) and is_expression(value))
_PATHS = listed("dotted paths, such as 'shop.consumers.receipts'", lambda path: isinstance(path, str) and "." in path)
OBSERVE = or_none(seconds(10))  # an option of the dashboard that switches the entry points
_SHARDS = listed("aliases in DATABASES", lambda alias: isinstance(alias, str) and bool(alias))
_MEDIA_TYPES = listed(
    "media types in lower case, such as 'text/csv'",
    lambda kind: isinstance(kind, str) and re.fullmatch(r"[a-z0-9.+-]+/[a-z0-9.+-]+", kind) is not None,
)
_TOKENS = listed(
    f"strings of at least {SHORTEST_TOKEN} visible characters each",
    lambda token: isinstance(token, str) and re.fullmatch(f"[!-~]{{{SHORTEST_TOKEN},}}", token) is not None,
)
_KEYS = listed(
    f"strings, each {KEY_LENGTH} bytes in base64",
    lambda key: isinstance(key, str) and len(decoded_key(key)) == KEY_LENGTH,
)
_KEYS_OR_PROVIDER = CallableRule(f"{_KEYS.what}, or a callable", lambda keys: callable(keys) or _KEYS.accepts(keys))
SecretKeys = Sequence[str] | Callable[[], Sequence[str | bytes]]


def _provided(name: str, keys: SecretKeys) -> tuple[bytes, ...]:
    """Return the bytes of the keys in a setting, newest first. A callable is called for them.

    Raises ``ImproperlyConfigured`` if the newest key is public, and if the callable fails or does not return keys.
    """
    try:
        provided = tuple(map(decoded_key, keys() if callable(keys) else keys))
    except Exception as error:  # a provider may raise anything; its text may hold a secret
        raise ImproperlyConfigured(f"The callable in {name} failed: {type(error).__name__}.") from error
    if callable(keys) and not provided:
        raise ImproperlyConfigured(f"The callable in {name} returned no key.")
    if any(len(key) != KEY_LENGTH for key in provided):
        raise ImproperlyConfigured(f"The callable in {name} returned a key that is not {KEY_LENGTH} bytes.")
    if provided and provided[0] in EXAMPLES:
        raise ImproperlyConfigured(f"{name}: the first key is an example from the documentation, so it is not secret.")
    return provided


# A derived digest key can't be used for decryption.
DERIVED = b"django-idempotency digest"
KEY_ID = 4  # bytes


def digest_key_id(key: bytes) -> bytes:
    """Return an id that distinguishes a digest key from others and reveals nothing about it."""
    return hashlib.sha256(b"django-idempotency digest key " + key).digest()[:KEY_ID]


@dataclass(frozen=True, kw_only=True)
class Conf:
    """The settings that no view overrides, and the policy that every view starts from: see ``docs/settings.md``."""

    enabled: bool = option(True, BOOLEAN)
    atomic: Atomic = option(Atomic(), an(Atomic))
    lease: Lease = option(Lease(), an(Lease))
    max_waiters: int = option(4, number(0, 1_000_000))
    header: str = option("Idempotency-Key", _HEADER)
    exempt_paths: Sequence[str] = option((), _EXPRESSIONS)
    problem_type_base_url: str | None = option(None, or_none(text("the beginning of a URL")))
    consumers: Sequence[str] = option((), _PATHS)
    instrumentation: Sequence[str] = option((), names_from(("prometheus", "opentelemetry")))
    metrics_tokens: Sequence[str] = option((), _TOKENS, secret=True)
    trace_record_id: bool = option(False, BOOLEAN)
    limits_cache: str = option("default", text("an alias in CACHES"))
    sweep_batch: int = option(1000, number(1, 1_000_000))
    sweep_pause: Kept[Seconds, float] = option(0.5, seconds(0))
    decisions: Sequence[str] = option((), names_from(("note", "second_operator")))
    resolve_content_types: Sequence[str] = option(("application/json", "text/plain"), _MEDIA_TYPES)
    shards: Sequence[str] = option((), _SHARDS)
    encryption_keys: SecretKeys = option((), _KEYS_OR_PROVIDER, secret=True)
    digest_keys: SecretKeys = option((), _KEYS_OR_PROVIDER, secret=True)
    stores: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, metadata={"rule": BACKENDS})
    outbox: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata={"rule": MAPPING})
    dashboard: Mapping[str, Any] = field(default_factory=dict, metadata={"rule": MAPPING})
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        validate(self)
        conform('IDEMPOTENCY["DASHBOARD"]["OBSERVE"]', self.dashboard.get("OBSERVE"), OBSERVE)
        object.__setattr__(self, "policy", self.complete(self.policy))

    def complete(self, policy: Policy) -> Policy:
        """Return ``policy`` over the project's, with the mode that its word means."""
        policy = policy.over(self.policy)
        mode: Any = policy.stated.get("mode", "atomic")
        meant = self.lease if mode == "lease" or isinstance(mode, Lease) else self.atomic
        return policy.derive(mode=meant if isinstance(mode, str) else mode.over(meant))

    @cached_property
    def protects(self) -> bool:
        return self.enabled and not self.observes

    @cached_property
    def observes(self) -> bool:
        """Whether entry points only watch requests, as the dashboard's ``OBSERVE`` has them do."""
        return self.enabled and self.dashboard.get("OBSERVE") is not None

    @cached_property
    def encryption(self) -> tuple[bytes, ...]:
        return _provided("ENCRYPTION_KEYS", self.encryption_keys)

    @cached_property
    def digests(self) -> Mapping[bytes, bytes]:
        """The digest keys by their ids, newest first: those that are set, then those derived from encryption keys.

        Because of the derived keys, digests made before a digest key was set remain comparable.
        """
        derived = (hmac.digest(key, DERIVED, "sha256") for key in self.encryption)
        return {digest_key_id(key): key for key in (*self.own_digest_keys, *derived)}

    @cached_property
    def own_digest_keys(self) -> tuple[bytes, ...]:
        return _provided("DIGEST_KEYS", self.digest_keys)

    @cached_property
    def meta_name(self) -> str:
        return "HTTP_" + self.header.upper().replace("-", "_")

    @cached_property
    def exempt(self) -> re.Pattern[str] | None:
        return re.compile("|".join(f"(?:{path})" for path in self.exempt_paths)) if self.exempt_paths else None


GLOBAL_NAMES = frozenset(rules(Conf))
RULES = {name.upper(): rule for name, rule in {**rules(Policy), **rules(Conf)}.items()}
NAMES = frozenset(RULES)
SECRETS = frozenset(declared.name.upper() for declared in fields(Conf) if not declared.repr)


def stated() -> dict[str, Any]:
    """Return the ``IDEMPOTENCY`` setting as the project's settings define it."""
    return getattr(settings, "IDEMPOTENCY", {})


def errors() -> list[str]:
    """Return a sentence for each unknown name in ``IDEMPOTENCY``."""
    return unknown_names(stated(), NAMES)


@lru_cache(maxsize=1)
def conf() -> Conf:
    """Return the settings in force.

    Raises ``ImproperlyConfigured``; for an unknown name, the message suggests the nearest valid one.
    """
    if not isinstance(stated(), Mapping):
        raise ImproperlyConfigured(f"IDEMPOTENCY is {stated()!r}; it must be a dict.")
    if wrong := errors():
        raise ImproperlyConfigured("IDEMPOTENCY: " + " ".join(wrong))
    options = {name.lower(): _conforming(name, value) for name, value in stated().items()}
    general = {name: options.pop(name) for name in list(options) if name in GLOBAL_NAMES}
    return Conf(**general, policy=Policy(**options))


def _conforming(name: str, value: Any) -> Any:
    """Return ``value`` with callables in place of their paths; a policy converts it."""
    setting = f'IDEMPOTENCY["{name}"]'
    value = _imported(setting, value, RULES[name])
    conform(setting, value, RULES[name], secret=name in SECRETS)
    return value


def _imported(setting: str, value: Any, rule: Rule) -> Any:
    if isinstance(value, Body):
        redact = _imported(f"{setting}.redact", value.redact, rules(Body)["redact"])
        return value.derive(redact=redact)
    if not (isinstance(rule, CallableRule) and isinstance(value, str) and "." in value):
        return value
    try:
        return import_string(value)
    except ImportError as error:
        raise ImproperlyConfigured(f"{setting} is {value!r}, which can't be imported: {error}.") from error


@lru_cache(maxsize=16)
def options_of_wing(name: str, options: type[Any]) -> Any:
    """Return the options of the wing that reads the entry ``name``, as an instance of the dataclass ``options``.

    Raises ``ImproperlyConfigured``. For an unknown name, its message gives the nearest valid one.
    """
    stated: Mapping[str, Any] = getattr(conf(), name.lower())
    known = {known.upper(): rule for known, rule in rules(options).items()}
    if wrong := unknown_names(stated, known):
        raise ImproperlyConfigured(f"{name}: " + " ".join(wrong))
    secrets = {declared.name.upper() for declared in fields(options) if not declared.repr}
    for given, value in stated.items():
        conform(f'IDEMPOTENCY["{name}"]["{given}"]', value, known[given], secret=given in secrets)
    try:
        return options(**{given.lower(): value for given, value in stated.items()})
    except ImproperlyConfigured as error:
        raise ImproperlyConfigured(f"{name}: {error}") from error


@lru_cache(maxsize=1024)
def resolve(policy: Policy) -> Policy:
    """Return a view's policy, completed by the project's policy."""
    return conf().complete(policy)


def debug() -> bool:
    return bool(settings.DEBUG)


def in_test_run() -> bool:
    """Whether Django's test environment is set up, which shows in ``mail.outbox``."""
    return hasattr(mail, "outbox")


def max_fields() -> int | None:
    """Return how many fields Django accepts in a query or a form; ``None`` for no limit."""
    return cast("int | None", settings.DATA_UPLOAD_MAX_NUMBER_FIELDS)


def max_body_in_memory() -> int | None:
    """Return how many bytes of a body Django keeps in memory; ``None`` for no limit."""
    return cast("int | None", settings.DATA_UPLOAD_MAX_MEMORY_SIZE)


def language() -> str:
    """Return the project's language, for texts that belong to no session."""
    return str(settings.LANGUAGE_CODE)


def middleware() -> list[str]:
    return list(settings.MIDDLEWARE)


def shared_apps() -> list[str] | None:
    shared = getattr(settings, "SHARED_APPS", None)
    return None if shared is None else list(shared)


def has_urls() -> bool:
    return bool(getattr(settings, "ROOT_URLCONF", None))


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        conf.cache_clear()
        resolve.cache_clear()
        options_of_wing.cache_clear()


setting_changed.connect(_forget)
