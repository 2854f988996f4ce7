"""The catalogues of translations: whole, compiled, and in step with the code. None of
it needs GNU gettext.
"""

from __future__ import annotations

import ast
import gettext
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from django.utils.translation.template import templatize

PACKAGE = Path(__file__).parents[2] / "django_idempotency"
CATALOGUES = sorted(PACKAGE.glob("locale/*/LC_MESSAGES/django.po"))
LANGUAGES = [path.parents[1].name for path in CATALOGUES]
ONE = {"_", "gettext", "gettext_lazy", "gettext_noop"}
SEVERAL = {"ngettext", "ngettext_lazy"}
PLACEHOLDER = re.compile(r"%%|%\(\w+\)[a-z]|\{\w*\}")
FIELD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d\])?) (".*")')
LITERAL = r'u?("(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\')'
IN_TEMPLATE = re.compile(rf"(n?p?)gettext\({LITERAL}(?:, ?{LITERAL})?")


@dataclass
class Message:
    fields: dict[str, str] = field(default_factory=dict)
    flags: str = ""

    @property
    def id(self) -> str:
        """As a compiled catalogue has it: with the context before it."""
        context = self.fields.get("msgctxt")
        return (
            self.fields["msgid"]
            if context is None
            else f"{context}\4{self.fields['msgid']}"
        )

    @property
    def translations(self) -> list[str]:
        return [text for name, text in self.fields.items() if name.startswith("msgstr")]


@cache
def messages(language: str) -> list[Message]:
    blocks = (
        (PACKAGE / "locale" / language / "LC_MESSAGES" / "django.po")
        .read_text()
        .strip()
        .split("\n\n")
    )
    head, *found = map(parsed, blocks)
    assert head.id == ""
    return found


def parsed(block: str) -> Message:
    message, name = Message(), ""
    for line in block.splitlines():
        if line.startswith("#,"):
            message.flags += line
        elif begun := FIELD.fullmatch(line):
            name, text = begun.groups()
            message.fields[name] = ast.literal_eval(text)
        elif not line.startswith("#"):
            message.fields[name] += ast.literal_eval(line)
    return message


def named(path: Path) -> gettext.GNUTranslations:
    with path.open("rb") as file:
        return gettext.GNUTranslations(file)


def test_the_only_catalogue_is_german():
    assert LANGUAGES == ["de"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_message_is_translated(language):
    left = [
        message.id
        for message in messages(language)
        if not message.translations or not all(message.translations)
    ]
    assert left == []
    assert [
        message.id for message in messages(language) if "fuzzy" in message.flags
    ] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_translation_has_the_placeholders_of_its_message(language):
    for message in messages(language):
        wanted = placeholders(
            message.fields.get("msgid_plural", message.fields["msgid"])
        )
        for text in message.translations:
            assert placeholders(text) == wanted or placeholders(text) == placeholders(
                message.fields["msgid"]
            ), text
            assert edges(text) == edges(message.fields["msgid"]), text


def placeholders(text: str) -> Counter[str]:
    return Counter(PLACEHOLDER.findall(text))


def edges(text: str) -> tuple[bool, bool]:
    """Blanks that a template or a sentence needs, and nobody sees in a catalogue."""
    return text.startswith(" "), text.endswith(" ")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_compiled_catalogue_is_that_of_the_text(language):
    compiled = named(
        PACKAGE / "locale" / language / "LC_MESSAGES" / "django.mo"
    )._catalog
    written: dict[object, str] = {}
    for message in messages(language):
        if "msgid_plural" in message.fields:
            written |= {
                (message.id, form): text
                for form, text in enumerate(message.translations)
            }
        else:
            written[message.id] = message.translations[0]
    del compiled[""]
    assert compiled == written


@cache
def trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if "migrations" not in path.parts
    }


def calls(names: set[str]) -> Iterator[tuple[Path, ast.Call]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node.func) in names:
                yield path, node


def name_of(function: ast.expr) -> str:
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else getattr(function, "id", "")
    )


def used() -> Iterator[str]:
    """The ids of all messages in the code and the templates."""
    for _path, call in calls(ONE | SEVERAL):
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Constant):
            yield first.value
    for path in PACKAGE.rglob("templates/**/*.html"):
        for kind, first, second in IN_TEMPLATE.findall(templatize(path.read_text())):
            texts = [ast.literal_eval(text) for text in (first, second) if text]
            yield "\4".join(texts) if kind == "p" else texts[0]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_catalogue_has_exactly_the_messages_of_the_code(language):
    assert {message.id for message in messages(language)} == set(used()), (
        "run: make messages"
    )


def test_messages_are_translated_before_they_are_put_together():
    """``gettext(f"…")`` is never found in a catalogue, and gettext does not look into
    f-strings for messages.
    """
    built = [
        place(*found)
        for found in calls(ONE | SEVERAL)
        if any(map(is_built, found[1].args))
    ]
    assert built == []
    inside = [
        place(path, inner)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and name_of(inner.func) in ONE | SEVERAL
    ]
    assert inside == []


def is_built(argument: ast.expr) -> bool:
    return isinstance(argument, ast.JoinedStr | ast.BinOp)


def place(path: Path, node: ast.expr) -> str:
    return f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_commands_are_written_in_english_alone():
    assert [
        place(*found)
        for found in calls(ONE | SEVERAL)
        if "management" in found[0].parts
    ] == []


ADMIN = sorted(PACKAGE.rglob("templates/admin/**/*.html"))


@pytest.mark.parametrize("path", ADMIN, ids=lambda path: path.name)
def test_a_template_of_the_admin_says_nothing_past_the_catalogues(path):
    text = re.sub(r"(?s){% block bodyclass %}.*?{% endblock %}", "", path.read_text())
    text = re.sub(
        r"(?s){% blocktranslate.*?{% endblocktranslate %}|{#.*?#}|{%.*?%}|{{.*?}}",
        "",
        text,
    )
    assert (
        re.findall(r'(?:aria-label|title|placeholder|alt)="[^"/]*\w[^"]*"', text) == []
    )
    assert re.findall(r"[A-Za-z]{2,}", re.sub(r"(?s)<[^>]*>|&\w+;", "", text)) == []
