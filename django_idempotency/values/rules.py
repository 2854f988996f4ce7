"""Options that are declared once, with type, default and rule in one line, for settings
and policies.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from django.core.exceptions import ImproperlyConfigured

Given = TypeVar("Given")
Read = TypeVar("Read")

Seconds = float | timedelta
LONGEST = 100 * 365 * 24 * 60 * 60  # seconds: a century, well within Python's calendar
# In place of ``None``: until about the year 9920, which every database can hold
FOR_GOOD = 79 * LONGEST


@dataclass(frozen=True, slots=True)
class Rule:
    """What the value of an option has to be.

    ``what``: completes "it must be …". ``accepts``: returns whether a value is valid.
    ``convert``: converts a valid value to the one that is kept. ``may_be_path``: the
    settings, which often can't import a callable, may name it.
    """

    what: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value
    may_be_path: bool = False


BOOLEAN = Rule("True or False", lambda value: isinstance(value, bool))


def option(default: Any, rule: Rule = BOOLEAN, *, secret: bool = False) -> Any:
    """Declare a field of a dataclass with its rule. Errors never show the value of a
    ``secret`` one.
    """
    return field(default=default, repr=not secret, metadata={"rule": rule})


class Kept(Generic[Given, Read]):
    """The type of a field that takes one type and keeps another. Only type checkers see
    more than the name.
    """

    if TYPE_CHECKING:

        def __get__(self, options: object, owner: type | None = None) -> Read: ...
        def __set__(self, options: object, value: Given) -> None: ...


class Options:
    """Base of dataclasses of options: a wrong name or value is refused, and the error
    says what is right.
    """

    def __new__(cls, *positional: object, **stated: Any) -> Self:
        known = [declared.name for declared in fields(cls)]  # type: ignore[arg-type]
        if positional:
            example = f"{cls.__name__}({known[0]}={positional[0]!r})"
            raise TypeError(f"{cls.__name__}: keyword options only, such as {example}.")
        if wrong := unknown_names(stated, known, cls.elsewhere()):
            raise TypeError(f"{cls.__name__}: " + " ".join(wrong))
        self = super().__new__(cls)
        vars(self)["_stated"] = stated
        return self

    def __post_init__(self) -> None:
        validate(self, f"{type(self).__name__}.")
        self.refuse_idle()

    @classmethod
    def elsewhere(cls) -> Mapping[str, str]:
        """Return how names are written that are options of a part of this."""
        return {}

    def refuse_idle(self) -> None:
        """Raise ``ImproperlyConfigured`` if an option has no effect beside the others,
        unless they were set in different places.
        """
        if not vars(self).get("_derived") and (idle := self.idle()):
            raise ImproperlyConfigured(f"{type(self).__name__}: {idle}.")

    def idle(self) -> str | None:
        """Return which option has no effect beside the others, and why."""
        return None

    @property
    def stated(self) -> dict[str, Any]:
        """The options that are set here. One that is set to its default overrides the
        settings.
        """
        given: dict[str, Any] = vars(self)["_stated"]
        return {
            name: value if isinstance(value, str) else getattr(self, name)
            for name, value in given.items()
        }

    def derive(self, **changes: Any) -> Self:
        """Return a copy with ``changes``. Options that neither sets still come from the
        settings.

        Raises ``TypeError`` for an unknown option.
        """
        stated = {**self.stated, **changes}
        derived = type(self).__new__(type(self), **stated)
        vars(derived)["_derived"] = True
        derived.__init__(**stated)  # type: ignore[misc]
        return derived

    def over(self, defaults: Self) -> Self:
        """Return these options, with ``defaults`` for those that are not set, in groups
        too.
        """
        return defaults.derive(
            **{
                name: _over(value, getattr(defaults, name))
                for name, value in self.stated.items()
            }
        )


def _over(value: Any, default: Any) -> Any:
    return (
        value.over(default)
        if isinstance(value, Options) and type(value) is type(default)
        else value
    )


def rules(options: type[Any]) -> dict[str, Rule]:
    return {
        declared.name: declared.metadata["rule"]
        for declared in fields(options)
        if "rule" in declared.metadata
    }


def validate(options: Any, prefix: str = "") -> None:
    """Check every field of ``options`` against its rule. Raises
    ``ImproperlyConfigured``.
    """
    for declared in fields(options):
        if rule := declared.metadata.get("rule"):
            name, value = declared.name, getattr(options, declared.name)
            object.__setattr__(
                options,
                name,
                conform(prefix + name, value, rule, secret=not declared.repr),
            )


def conform(name: str, value: Any, rule: Rule, *, secret: bool = False) -> Any:
    """Return ``value`` as it is kept. Raises ``ImproperlyConfigured``, which says what
    it must be, if it is wrong.
    """
    if not rule.accepts(value):
        subject = f"{name}:" if secret else f"{name} is {value!r};"
        raise ImproperlyConfigured(f"{subject} it must be {rule.what}.")
    return rule.convert(value)


# --- Rules ----------------------------------------------------------------------------

CALLABLE = Rule("a callable", callable, may_be_path=True)
MAPPING = Rule("a dict", lambda value: isinstance(value, Mapping))
BACKEND_KEYS = {"BACKEND", "OPTIONS"}


def _is_backend(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("BACKEND"), str)
        and not value.keys() - BACKEND_KEYS
    )


BACKENDS = Rule(
    "a dict of dicts with BACKEND, the path of a class, and OPTIONS, its arguments",
    lambda value: isinstance(value, Mapping) and all(map(_is_backend, value.values())),
)


def is_expression(value: object) -> bool:
    """Whether ``value`` is a regular expression for text, compiled or not."""
    try:
        return isinstance(value, str | re.Pattern) and isinstance(
            re.compile(value).pattern, str
        )
    except re.error:
        return False


def text(what: str, is_right: Callable[[str], Any] = lambda _text: True) -> Rule:
    return Rule(what, lambda value: isinstance(value, str) and bool(is_right(value)))


def number(smallest: float, largest: float, what: str = "a number") -> Rule:
    def is_right(value: Any) -> bool:
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and smallest <= value <= largest
        )

    limits = (
        f"from {smallest} to {largest}"
        if largest < math.inf
        else f"of at least {smallest}"
    )
    return Rule(f"{what} {limits}", is_right)


def seconds(smallest: float, largest: float = LONGEST) -> Rule:
    """Return the rule for a duration: a number of seconds or a ``timedelta``, kept as a
    number.
    """
    plain = number(smallest, largest, "a number of seconds")

    def as_number(value: Any) -> Any:
        return value.total_seconds() if isinstance(value, timedelta) else value

    return Rule(
        f"{plain.what}, or a timedelta",
        lambda value: plain.accepts(as_number(value)),
        as_number,
    )


def instance_of(group: type[Options]) -> Rule:
    name = group.__name__
    return Rule(
        f"{'an' if name[0] in 'AEIOU' else 'a'} {name}(…)",
        lambda value: isinstance(value, group),
    )


def one_of(choices: Iterable[str]) -> Rule:
    words = tuple(choices)
    return Rule(f"one of {', '.join(words)}", lambda value: value in words)


def many(what: str, is_right: Callable[[Any], bool]) -> Rule:
    """Return the rule for a list, tuple or set; the value is kept as a frozenset."""

    def are_right(values: Any) -> bool:
        return (
            isinstance(values, Collection)
            and not isinstance(values, str | bytes)
            and all(map(is_right, values))
        )

    return Rule(f"a list, tuple or set of {what}", are_right, frozenset)


def listed(what: str, is_right: Callable[[Any], bool]) -> Rule:
    """Return the rule for a list or tuple, whose order counts."""
    return Rule(
        f"a list of {what}",
        lambda values: isinstance(values, list | tuple) and all(map(is_right, values)),
    )


def names_from(choices: Sequence[str]) -> Rule:
    return listed(f"names from {', '.join(choices)}", choices.__contains__)


def or_none(rule: Rule) -> Rule:
    return _or(Rule("None", lambda value: value is None), rule)


def or_for_good(rule: Rule) -> Rule:
    """Return the rule for a duration of which ``None``, kept as ``FOR_GOOD``, has no
    end.
    """
    return Rule(
        f"{rule.what}, or None for good",
        lambda value: value in (None, FOR_GOOD) or rule.accepts(value),
        lambda value: FOR_GOOD if value is None else rule.convert(value),
    )


def is_for_good(seconds: float) -> bool:
    """Whether a record with so much time left has no end."""
    return seconds > LONGEST


def or_callable(rule: Rule) -> Rule:
    return _or(CALLABLE, rule)


def _or(other: Rule, rule: Rule) -> Rule:
    return Rule(
        f"{rule.what}, or {other.what}",
        lambda value: other.accepts(value) or rule.accepts(value),
        lambda value: value if other.accepts(value) else rule.convert(value),
        other.may_be_path or rule.may_be_path,
    )


# --- Names ----------------------------------------------------------------------------


def nearest(wrong: object, right: Iterable[str]) -> str:
    """Return a sentence that suggests the valid word for a wrong one, ignoring case."""
    words = {word.lower(): str(word) for word in sorted(right)}
    if close := difflib.get_close_matches(str(wrong).lower(), words, n=1, cutoff=0.5):
        return f"did you mean {words[close[0]]!r}?"
    if len(words) == 1:
        return f"it must be {next(iter(words.values()))!r}."
    return f"it must be one of {', '.join(words.values())}."


def unknown_names(
    options: Mapping[str, Any],
    known: Iterable[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return a sentence for each name in ``options`` that is not ``known``.

    ``elsewhere``: how to write names that belong to other options.
    """
    known = sorted(known)
    return [
        f"Unknown name {name!r}: write {elsewhere[name]}."
        if name in elsewhere
        else f"Unknown name {name!r}: {nearest(name, known)}"
        for name in options
        if name not in known
    ]
