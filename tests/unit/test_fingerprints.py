"""Equal requests have equal fingerprints and different ones different; no bytes
whatever make an error of it.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from urllib.parse import quote, urlencode

import pytest
from django.core.exceptions import BadRequest, SuspiciousOperation
from django.core.files.uploadedfile import SimpleUploadedFile, UploadedFile
from django.http.multipartparser import MultiPartParserError
from django.test import RequestFactory
from django.test.client import encode_multipart
from hypothesis import assume
from hypothesis import strategies as st

from django_idempotency.values import fingerprints
from django_idempotency.values.fingerprints import fingerprint
from tests.support.properties import given

FORM = "application/x-www-form-urlencoded"
NAMES = st.text(max_size=5)
PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4)
    ),
)
FIELDS = st.dictionaries(
    st.text(min_size=1, max_size=5),
    st.lists(st.text(max_size=5), max_size=3),
    max_size=4,
)


def of(
    body=b"",
    content_type="application/json",
    method="POST",
    path="/pay/",
    query="",
    **chosen,
):
    request = RequestFactory().generic(
        method, path, body, content_type, QUERY_STRING=query
    )
    return fingerprint(request, **chosen)


def multipart(fields, boundary="b", method="POST"):
    body = encode_multipart(boundary, fields)
    return RequestFactory().generic(
        method, "/pay/", body, f"multipart/form-data; boundary={boundary}"
    )


def of_multipart(fields, boundary="b", **chosen):
    return fingerprint(multipart(fields, boundary), **chosen)


def shuffled(value, rng):
    """The same JSON value, written in another order."""
    if isinstance(value, dict):
        items = [(name, shuffled(inner, rng)) for name, inner in value.items()]
        rng.shuffle(items)
        return dict(items)
    return (
        [shuffled(inner, rng) for inner in value] if isinstance(value, list) else value
    )


def reordered(fields, rng):
    """The same fields, mixed, but the values of each in their order."""
    queues = {name: list(values) for name, values in fields.items()}
    names = [name for name, values in fields.items() for _ in values]
    rng.shuffle(names)
    return [(name, queues[name].pop(0)) for name in names]


@given(
    VALUES,
    st.randoms(use_true_random=False),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_the_order_of_names_white_space_and_escapes_do_not_count(
    value, rng, indent, ascii_only
):
    other = json.dumps(shuffled(value, rng), indent=indent, ensure_ascii=ascii_only)
    assert of(other) == of(json.dumps(value))


@given(VALUES, VALUES)
def test_different_json_values_differ(one, other):
    assume(json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True))
    assert of(json.dumps(one)) != of(json.dumps(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1.50", "1.5"),
        ("0", "-0.0"),
        ("1" + "0" * 200, "1" + "0" * 200 + ".0"),
        ("0.1000000000000000000000000000", "0.1"),
        ('"\\u00e9"', '"é"'),
        ('"\\/"', '"/"'),
        ("[null,0]", "[\tnull,\r\n -0 ]"),
        ('["é","a  b"]', '[ "\\u00e9","a \\u0020b" ]'),
        ('{"a": 1.0, "b": [100.0]}', '{"b":[100],"a":1}'),
        ('{"a": 1}', '{"\\u0061": 1}'),
    ],
)
def test_the_same_meaning_written_otherwise_is_the_same(one, other):
    assert of(one.encode()) == of(other.encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "2"),
        ("1", '"1"'),
        ("1", "true"),
        ("0", "false"),
        ("0.1", "0.10000000000000001"),
        ("9007199254740993", "9007199254740992"),
        ("1e400", "1e401"),
        ("0.3", "0.30000000000000004"),
        ("1e-400", "0"),
        ("1e-400", "1e-401"),
        ("1234567890123456", "1.2345678901234567e15"),
        ("0.5", '"0.5"'),
        ("1.5", '[1e999,"1.5"]'),
        ("null", "{}"),
        ('{"a": null}', "{}"),
        ("[[1], 2]", "[1, [2]]"),
        ('"é"', '"e\u0301"'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
        ('{"a": "\\"", "a": 2}', '{"a": 2}'),
        ('{"\\u0022": 1, "\\\\": 2, "\\"": 3}', '{"\\"": 3, "\\\\": 2}'),
        ("NaN", "Infinity"),
        ("[]", ""),
    ],
)
def test_another_meaning_differs(one, other):
    assert of(one.encode()) != of(other.encode())


@given(
    st.decimals(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False),
)
def test_numbers_of_another_value_differ(one, other):
    assume(one != other)
    assert of(f"[{one}]") != of(f"[{other}]")


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "application/vnd.api+json"]
)
def test_all_json_is_read_as_json(content_type):
    assert of('{"a": 1, "b": 2}', content_type) == of('{"b": 2, "a": 1}', content_type)


@given(FIELDS, st.randoms(use_true_random=False))
def test_the_order_between_form_fields_does_not_count(fields, rng):
    pairs = [(name, value) for name, values in fields.items() for value in values]
    assert of(urlencode(reordered(fields, rng)), FORM) == of(urlencode(pairs), FORM)


@given(FIELDS, FIELDS)
def test_different_forms_differ(one, other):
    def meaning(fields):
        return {name: values for name, values in fields.items() if values}

    assert (
        of(urlencode(one, doseq=True), FORM) == of(urlencode(other, doseq=True), FORM)
    ) == (meaning(one) == meaning(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=b+c", b"a=b%20c"),
        (b"%61=1", b"a=1"),
        (b"a=\xc3\xa9", b"a=%c3%A9"),
        (b"a=\xe9", b"a=%E9"),
    ],
)
def test_a_form_escaped_otherwise_is_the_same(one, other):
    assert of(one, FORM) == of(other, FORM)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a=", b""),
        (b"a=1&b=2", b"a=1%26b=2"),
        (b"a=bc", b"ab=c"),
        (b"a=\xc3\xa9", b"a=%C3%83%C2%A9"),
    ],
)
def test_forms_that_only_look_alike_differ(one, other):
    assert of(one, FORM) != of(other, FORM)


@given(
    st.text("abcXYZ0189", min_size=1, max_size=20), st.randoms(use_true_random=False)
)
def test_a_new_multipart_boundary_and_order_are_the_same_request(boundary, rng):
    fields = [
        ("a", "1"),
        ("b", "é"),
        ("file", SimpleUploadedFile("n.bin", b"\0\xff" * 10)),
    ]
    rng.shuffle(fields)
    original = {"file": SimpleUploadedFile("n.bin", b"\0\xff" * 10), "b": "é", "a": "1"}
    assert of_multipart(dict(fields), boundary) == of_multipart(original, "other")


@pytest.mark.parametrize(
    "changed",
    [
        {"a": "2", "file": SimpleUploadedFile("n", b"x")},
        {"a": "1", "file": SimpleUploadedFile("n", b"y")},
        {"a": "1", "file": SimpleUploadedFile("m", b"x")},
        {"a": "1", "other": SimpleUploadedFile("n", b"x")},
        {"a": "1", "file": "x"},
        {"a": "1"},
    ],
)
def test_another_field_file_or_file_name_differs(changed):
    assert of_multipart(changed) != of_multipart(
        {"a": "1", "file": SimpleUploadedFile("n", b"x")}
    )


def test_a_file_counts_from_its_beginning_however_much_of_it_was_read():
    untouched, read = (
        multipart({"file": SimpleUploadedFile("n", b"content")}) for _ in range(2)
    )
    read.FILES["file"].read(3)
    assert fingerprint(read) == fingerprint(untouched)


def test_a_form_that_was_parsed_already_is_not_read_again():
    """By a view's own parsers, of a method whose forms Django does not parse."""
    fields = ({"file": SimpleUploadedFile("n", b"content"), "a": "1"} for _ in range(2))
    untouched, parsed = (multipart(each, method="PUT") for each in fields)
    parsed.method = "POST"
    assert parsed.POST["a"] == "1"
    parsed.method = "PUT"
    assert fingerprint(parsed) == fingerprint(untouched)


def test_a_large_file_is_digested_in_pieces_and_left_at_its_beginning(settings):
    settings.FILE_UPLOAD_MAX_MEMORY_SIZE = 1024
    content = random.Random(0).randbytes(3 * UploadedFile.DEFAULT_CHUNK_SIZE + 1)
    request = multipart({"file": SimpleUploadedFile("n", content)})
    assert len(fingerprint(request)) == 32
    assert request.FILES["file"].read() == content
    request.close()


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_other_bodies_count_by_their_bytes(one, other):
    assert (of(one, "text/csv") == of(other, "text/csv")) == (one == other)


@given(FIELDS, st.randoms(use_true_random=False))
def test_the_order_of_the_query_does_not_count(fields, rng):
    pairs = [(name, value) for name, values in fields.items() for value in values]
    assert of(query=urlencode(reordered(fields, rng))) == of(query=urlencode(pairs))


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "PUT"},
        {"path": "/pay"},
        {"path": "/pay/1"},
        {"query": "a=2"},
        {"query": ""},
        {"query": "a=1&b"},
    ],
)
def test_another_method_path_or_query_differs(changed):
    assert of(b"{}", **{"query": "a=1"} | changed) != of(b"{}", query="a=1")


def test_the_order_of_one_query_fields_values_counts():
    assert of(query="a=1&b=3&a=2") == of(query="b=3&a=1&a=2")
    assert of(query="a=1&a=2") != of(query="a=2&a=1")


def test_content_that_moves_from_one_part_to_another_differs():
    assert of(b"a=1", FORM) != of(b"", FORM, query="a=1")
    assert of(b"1", "text/plain", path="/a") != of(b"", "text/plain", path="/a1")
    assert of(b"a=1", FORM) != of(b"a=1", "text/plain")
    assert of(b'{"a": "1"}') != of(b"a=1", FORM)
    assert of(b"a=1", FORM, query="=form") != of(b"=form&a=1", FORM)


@pytest.mark.parametrize(
    ("write", "content_type"), [(json.dumps, "application/json"), (urlencode, FORM)]
)
def test_fields_can_be_selected_and_excluded(write, content_type):
    one, other = (write({"amount": 5, "sent_at": moment}) for moment in (1, 2))

    def same(**chosen):
        return of(one, content_type, **chosen) == of(other, content_type, **chosen)

    assert same(exclude={"sent_at"})
    assert same(only={"amount"})
    assert not same()
    assert not same(exclude={"amount"})
    assert not same(only={"sent_at"})


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_a_new_boundary_is_the_same_request_whatever_the_method(method):
    def request(boundary, **fields):
        return multipart(
            {"file": SimpleUploadedFile("n", b"x"), **fields}, boundary, method
        )

    first, again, other = request("b"), request("c"), request("b", more="1")
    assert fingerprint(first) == fingerprint(again) != fingerprint(other)
    assert first.method == method
    assert not first.POST, "for the view nothing has changed"
    assert first.body == encode_multipart("b", {"file": SimpleUploadedFile("n", b"x")})


def test_selected_fields_of_multipart_and_only_the_top_level_of_json():
    one, other = (
        {"a": 1, "f": SimpleUploadedFile("n", content)} for content in (b"x", b"y")
    )
    assert of_multipart(one, exclude={"f"}) == of_multipart(other, exclude={"f"})
    assert of_multipart({"a": 1, "b": 2}, only={"a"}) == of_multipart(
        {"a": 1, "b": 3}, only={"a"}
    )
    assert of('{"a": {"b": 1}}', exclude={"b"}) != of('{"a": {"b": 2}}', exclude={"b"})
    assert of('[{"b": 1}]', exclude={"b"}) == of('[{"b": 2}]', exclude={"b"})
    assert of('[{"b": 1}]', only={"b"}) == of('[{"b": 1, "a": 1}]', only={"b"})


def test_a_custom_fingerprint_includes_method_and_path():
    one, other = RequestFactory().post("/a/"), RequestFactory().post("/b/")
    assert fingerprints.of_bytes(one, b"order 7") == fingerprints.of_bytes(
        RequestFactory().post("/a/?q"), b"order 7"
    )
    assert fingerprints.of_bytes(one, b"order 7") != fingerprints.of_bytes(
        one, b"order 8"
    )
    assert fingerprints.of_bytes(one, b"order 7") != fingerprints.of_bytes(
        other, b"order 7"
    )


MEDIA_TYPES = [
    "application/json",
    "a/b+json",
    "application/json;;",
    FORM,
    f"{FORM}; charset=nonsense",
    "text/plain",
    "",
]


@given(st.binary(max_size=200), st.sampled_from(MEDIA_TYPES), st.binary(max_size=50))
def test_a_body_of_any_bytes_has_a_fingerprint(body, content_type, query):
    assert (
        len(
            of(
                body,
                content_type,
                query=query.decode("latin-1"),
                path=quote(query) or "/",
            )
        )
        == 32
    )


@given(st.text(max_size=100), st.sampled_from(MEDIA_TYPES))
def test_a_body_of_any_text_with_surrogates_has_a_fingerprint(text, content_type):
    body = (json.dumps(text) + text).encode("utf-8", "surrogatepass")
    assert len(of(body, content_type)) == 32
    assert len(of(b'{"\\ud800": "\\udfff"}', content_type)) == 32


@given(
    st.binary(max_size=300),
    st.sampled_from(["b", "", "é", "x" * 300]),
    st.booleans(),
    examples=150,
)
def test_malformed_multipart_is_nothing_worse_than_a_bad_request(
    noise, boundary, headed
):
    head = (
        b'--b\r\nContent-Disposition: form-data; name="a"; filename="f"\r\n'
        if headed
        else b""
    )
    # Django answers these with 400
    with suppress(MultiPartParserError, SuspiciousOperation, BadRequest):
        assert len(of(head + noise, f"multipart/form-data; boundary={boundary}")) == 32


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize(("before", "after"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_accepted(depth, before, after):
    assert len(of(before * depth + "1" + after * depth)) == 32


@pytest.mark.parametrize(
    "number",
    [
        "1" * 5000,
        "-" + "9" * 99_999,
        "1e999999999999",
        "1e-999999999999999999999",
        "1." + "3" * 9999,
    ],
)
def test_long_numbers_are_accepted(number):
    assert len(of(number)) == 32
    assert of(number) != of(number + "1")


def test_a_body_that_was_read_before_is_still_there():
    request = RequestFactory().post("/", b'{"a": 1}', content_type="application/json")
    assert request.body
    assert fingerprint(request) == of(b'{"a":1}', path="/")


@pytest.mark.parametrize(
    "body",
    [
        "[NaN]",
        "[Infinity]",
        f"[{'1' * 5000}]",
        f"[{'1' * 5000}.0]",
        '{"a": 1, "a": 1}',
        '{"a": 1.5, "a": 1.5}',
    ],
)
def test_json_without_an_agreed_meaning_counts_by_its_bytes(body):
    assert of(body) != of(f" {body}")


@pytest.mark.parametrize(
    "inside", ["x" * 20_000, ["x"] * 5000], ids=["few quotation marks", "many"]
)
def test_a_repeated_name_is_found_in_a_long_body(inside):
    text = json.dumps(inside)
    assert of(f'{{"b": {text}, "a": 1}}') == of(f'{{"a":1,"b":{text}}}')
    assert of(f'{{"b": {text}, "a": 1, "a": 1}}') != of(f'{{"b":{text},"a":1,"a":1}}')


def test_a_repeated_name_is_found_behind_escaped_quotation_marks():
    """What is repeated counts by its bytes, and what is not by its meaning, whatever is
    escaped in it.
    """
    strings = json.dumps(['"', "\\", '\\"', '\\\\"', '":', '"a":1'])
    assert of(f'{{"b": {strings}, "a": 1}}') == of(f'{{"a":1,"b":{strings}}}')
    assert of(f'{{"b": {strings}, "b": 1}}') != of(f'{{"b":{strings}, "b":1}}')


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be"])
def test_json_counts_by_meaning_in_every_encoding_of_unicode(encoding):
    one, other = '{"a": "\u2200\u0122", "b": 1}', '{"b": 1, "a": "\u2200\u0122"}'
    assert of(one.encode(encoding)) == of(other)


OF_VERSION_1 = {
    "raw": (lambda: of(b"a,b", "text/csv", query="b=2&a=1"), "fc84d0689c876402"),
    "JSON": (
        lambda: of(b'{"b": [1.50, 2.0, "\xc3\xa9", null], "a": {}}'),
        "c7ce1a39fc4a0cda",
    ),
    "not JSON": (lambda: of(b"{", "application/json"), "3793939645681b6d"),
    "form": (lambda: of(b"b=1&a=%C3%A9&a=2", FORM), "8f0dc3d8583dd806"),
    "multipart": (
        lambda: of_multipart({"a": "\xe9", "f": SimpleUploadedFile("n", b"x")}),
        "bc34ce1f2c874775",
    ),
    "the view's own": (
        lambda: fingerprints.of_bytes(RequestFactory().post("/a/"), b"order 7"),
        "b26afa1bca9049ff",
    ),
}


@pytest.mark.parametrize(
    ("request_", "expected"), OF_VERSION_1.values(), ids=OF_VERSION_1
)
def test_a_fingerprint_stays_the_same_until_its_version_changes(request_, expected):
    """Records outlive a deployment: otherwise every retry across it would be a
    mismatch.
    """
    assert fingerprints.VERSION == b"1"
    assert request_().hex()[:16] == expected


def card(cvv, **others):
    return {"amount": 5, "card": {"number": "4242", "cvv": cvv} | others}


def of_json(value, **chosen):
    return of(json.dumps(value), **chosen)


def of_form(fields, **chosen):
    return of(urlencode(fields).encode(), FORM, **chosen)


def test_a_nested_field_is_excluded():
    assert of_json(card("1"), exclude={"card.cvv"}) == of_json(
        card("2"), exclude={"card.cvv"}
    )
    assert of_json(card("1"), exclude={"card.cvv"}) != of_json(
        card("1", number="4243"), exclude={"card.cvv"}
    )
    assert of_json(card("1"), exclude={"cvv"}) != of_json(card("2"), exclude={"cvv"})
    assert of_json(card("1"), exclude={"card.cv"}) != of_json(
        card("2"), exclude={"card.cv"}
    )
    assert of_json({"a": {"b": {"c": 1}}}, exclude={"a.b.c"}) == of_json(
        {"a": {"b": {"c": 2}}}, exclude={"a.b.c"}
    )


@pytest.mark.parametrize("exclude", [frozenset(), {"a.b"}])
@pytest.mark.parametrize(
    ("depth", "same"),
    [(fingerprints.MAX_DEPTH - 1, True), (fingerprints.MAX_DEPTH, False)],
)
def test_json_nested_beyond_the_limit_counts_by_its_bytes(depth, same, exclude):
    compact, spaced = (
        b'{"a":%s%s1%s}' % (space, b"[" * depth, b"]" * depth) for space in (b"", b" ")
    )
    assert (of(compact, exclude=exclude) == of(spaced, exclude=exclude)) is same


def test_brackets_in_strings_are_not_depth():
    strings = ["[" * 200, "}" * 200, ":[", "]{"]
    assert of(json.dumps(strings, indent=1).encode()) == of(
        json.dumps(strings).encode()
    )


# What one level begins and ends with. Brackets in strings seem to close and to open it.
LEVELS = {
    "plain": (b"[", b"]"),
    "strings": (b'["]",', b',"["]'),
    "escaped quotes": (b'["\\"]\\"",', b',"\\"[\\""]'),
}


@pytest.mark.parametrize("level", LEVELS.values(), ids=LEVELS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le"])
@pytest.mark.parametrize("exclude", [frozenset(), {"a.b"}])
@pytest.mark.parametrize("depth", [90, 300, 900])
def test_a_fingerprint_does_not_depend_on_the_stack(depth, exclude, encoding, level):
    body = (
        (b'{"a": %s1%s}' % (level[0] * depth, level[1] * depth))
        .decode()
        .encode(encoding)
    )

    def called_from(frames):
        return called_from(frames - 1) if frames else of(body, exclude=exclude)

    assert called_from(0) == called_from(400)


def test_a_nested_field_is_selected():
    chosen = {"only": {"amount", "card.number"}}
    assert of_json(card("1"), **chosen) == of_json(card("2", name="Ann"), **chosen)
    assert of_json(card("1"), **chosen) != of_json(card("1", number="4243"), **chosen)
    whole = {"only": {"card"}, "exclude": {"card.cvv"}}
    assert of_json(card("1"), **whole) == of_json(card("2"), **whole)
    assert of_json(card("1"), **whole) != of_json(card("1", name="Ann"), **whole)


@pytest.mark.parametrize(
    "chosen",
    [
        {"exclude": {"items.note", "items.at"}},
        {"only": {"items.sku", "id"}},
        {"only": {"items"}, "exclude": {"items.note", "items.at"}},
    ],
    ids=["exclude", "only", "both"],
)
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: [[it], it]])
def test_a_name_leads_through_arrays(wrap, chosen):
    def basket(sku, note, *more):
        items = [wrap({"sku": sku, "note": note, "at": [note]}), 5, {"sku": sku}, *more]
        return of_json({"items": items, "id": 7}, **chosen)

    assert basket("a", 1) == basket("a", 2)
    assert basket("a", 1) != basket("b", 1)
    assert basket("a", 1) != basket("a", 1, {})


def test_an_array_and_an_object_of_its_places_differ():
    array, places = ({"a": value} for value in ([{"b": 1}], {"0": {"b": 1}}))
    for chosen in ({"exclude": {"a.x"}}, {"only": {"a.b"}}):
        assert of_json(array, **chosen) != of_json(places, **chosen)


@pytest.mark.parametrize("name", ["items[0][note]", "items[][note]", "items.0.note"])
@pytest.mark.parametrize("send", [of_form, of_multipart])
def test_a_name_leads_through_the_places_of_a_form(send, name):
    one, other = ({name: note, "items[0][sku]": "a"} for note in "12")
    assert send(one, exclude={"items.note"}) == send(other, exclude={"items.note"})
    assert send(one, only={"items.sku"}) == send(other, only={"items.sku"})
    assert send(one, only={"items.note"}) != send(other, only={"items.note"})
    assert send(one, exclude={name}) == send(other, exclude={name})


def test_a_name_with_a_dot_is_excluded():
    assert of_json({"card.cvv": 1}, exclude={"card.cvv"}) == of_json(
        {"card.cvv": 2}, exclude={"card.cvv"}
    )


@pytest.mark.parametrize("send", [of_form, of_multipart])
@pytest.mark.parametrize("name", ["card.cvv", "card[cvv]"])
@pytest.mark.parametrize("exclude", ["card.cvv", "card"])
def test_a_nested_field_of_a_form_is_excluded(send, name, exclude):
    assert send({"a": 1, name: 1}, exclude={exclude}) == send(
        {"a": 1, name: 2}, exclude={exclude}
    )
    assert send({"a": 1, name: 1}, exclude={exclude}) != send(
        {"a": 2, name: 1}, exclude={exclude}
    )
    assert send({name: 1}, exclude={name}) == send({name: 2}, exclude={name})
    assert send({name: 1}, only={exclude}) != send({name: 2}, only={exclude})
    assert send({name: 1}, only={"a"}) == send({name: 2}, only={"a"})
    assert send({name: 1}, exclude={"cvv", "car"}) != send(
        {name: 2}, exclude={"cvv", "car"}
    )


@given(VALUES, st.frozensets(NAMES, max_size=3))
def test_fields_that_are_not_there_change_nothing(value, names):
    exclude = {f"absent.{name}" for name in names}
    assert of_json(value, exclude=exclude) == of_json(value)
