"""From headers to keys, and from keys to identifiers: the same for the same, different
for different.
"""

from __future__ import annotations

from hashlib import sha256

import http_sf
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from django_idempotency.values.exceptions import MalformedKey
from django_idempotency.values.keys import (
    MAX_LENGTH,
    child_key,
    id_range,
    parse_key,
    record_id,
)
from tests.support.properties import given

VISIBLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
KEYS = st.text(VISIBLE, min_size=1, max_size=MAX_LENGTH)
TEXTS = st.text(max_size=300)


@given(KEYS, st.booleans())
def test_a_quoted_key_is_read_back(key, strict):
    assert parse_key(http_sf.ser(key), strict=strict) == key


@given(TEXTS, st.booleans())
def test_any_header_is_a_usable_key_or_malformed(value, strict):
    try:
        key = parse_key(value, strict=strict)
    except MalformedKey:
        return
    assert 1 <= len(key) <= MAX_LENGTH
    assert all("!" <= character <= "~" for character in key)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ('"8e03978e-40d5"', "8e03978e-40d5"),
        (' \t"padded"\t ', "padded"),
        ('"with";a=1;b', "with"),
        (r'"quote\"slash\\"', 'quote"slash\\'),
        ('"' + "x" * 255 + '"', "x" * 255),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_string_is_read_as_the_draft_writes_it(header, key, strict):
    assert parse_key(header, strict=strict) == key


@pytest.mark.parametrize(
    "bare",
    [
        "8e03978e-40d5",
        "123",
        "12:30",
        ":YWJj:",
        "?1",
        "@1659578233",
        "order/7",
        "x" * 255,
    ],
)
def test_a_bare_key_equals_the_quoted_one_unless_strict(bare):
    assert parse_key(bare) == parse_key(f'"{bare}"') == bare
    with pytest.raises(MalformedKey, match="quoted string"):
        parse_key(bare, strict=True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        " \t",
        '""',
        '" "',
        '"a b"',
        "a b",
        "a,b",
        '"a", "b"',
        '("a" "b")',
        "a;b",
        '"open',
        'close"',
        'mid"dle',
        '"a" b',
        r'"\x"',
        "back\\slash",
        "nul\0",
        '"nul\0"',
        "tab\tbed",
        "line\nfeed",
        "é",
        '"é"',
        '%"d%c3%a9j%c3%a0"',
        "\udce9",
        "x" * 256,
        '"' + "x" * 256 + '"',
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_malformed_key_is_refused_with_a_sentence_that_can_be_sent(header, strict):
    with pytest.raises(MalformedKey) as refused:
        parse_key(header, strict=strict)
    assert str(refused.value).isascii() or "…" in str(refused.value)
    assert len(str(refused.value)) < 400


def test_only_blanks_and_tabs_are_stripped_from_a_key():
    assert parse_key("\t X-key-X ") == "X-key-X"
    with pytest.raises(MalformedKey):
        parse_key("\x0bkey")


@given(TEXTS, KEYS)
def test_the_record_id_is_stable_and_within_the_range(scope, key):
    first, last = id_range(key)
    assert record_id(scope, key) == record_id(scope, key)
    assert first <= record_id(scope, key) <= last


@given(st.tuples(TEXTS, KEYS), st.tuples(TEXTS, KEYS))
def test_different_scopes_or_keys_have_different_ids(one, other):
    assume(one != other)
    assert record_id(*one) != record_id(*other)


@given(KEYS, KEYS)
def test_the_ranges_of_two_keys_do_not_meet(one, other):
    assume(one != other)
    (first, last), (other_first, other_last) = id_range(one), id_range(other)
    assert last < other_first or other_last < first


@given(KEYS, TEXTS, TEXTS)
def test_child_keys_differ_by_name_and_parent_and_repeat_for_the_same(key, name, other):
    parent = record_id("user:1", key)
    assert child_key(parent, name) == child_key(parent, name)
    assert child_key(parent, name) != child_key(record_id("user:2", key), name)
    assert name == other or child_key(parent, name) != child_key(parent, other)


def test_a_child_key_is_itself_a_key():
    key = child_key(record_id("user:1", "k"), "gateway")
    assert parse_key(key) == parse_key(f'"{key}"', strict=True) == key


def test_identifiers_stay_the_same_from_one_release_to_the_next():
    """Records outlive a deployment, and so does what was sent downstream under a child
    key.
    """
    ids = [record_id(f"user:{n}", f"key {n}é") for n in range(50)]
    assert (
        sha256(b"".join(id.bytes for id in ids)).hexdigest()[:16] == "68ec2623d64596b2"
    )
    assert [bound.hex for bound in id_range("key")] == [
        f"2c70e12b7a0646f9{end}" for end in ("0" * 16, f"7{'f' * 15}")
    ]
    assert child_key(ids[1], "charge") == "bad0523e-94d3-ce19-4f1c-832fc28ac33d"


def test_a_scope_of_whatever_text_has_an_identifier():
    assert record_id("\ud800", "k") != record_id("\ud801", "k")
