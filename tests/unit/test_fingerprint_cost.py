"""A fingerprint costs little more than parsing the request, whatever is sent."""

from __future__ import annotations

import hashlib
import json
import math
import time
import tracemalloc
from urllib.parse import parse_qsl

import pytest

from django_idempotency.values.fingerprints import (
    MAX_DIGITS,
    MAX_FRACTIONS,
    canonical_json,
)
from tests.unit.test_fingerprints import FORM, of

COUNT = 30_000
RATIO = 10  # measured are 0.2 to 3.6 on an idle machine, and 5.04 on a busy one
ROUNDS = 600


def listed(value, count=COUNT):
    return f"[{','.join([value] * count)}]".encode()


SHAPES = {
    "exponents": listed("1e999"),
    "small exponents": listed("1e9"),
    "floats": listed("0.1234567890123456"),
    "prices": listed("12.50"),
    "integers": listed("123456"),
    "a few odd numbers among many": listed("7")[:-1] + b",1e999,1.50]",
    "empty objects": listed("{}"),
    "small objects": listed('{"a":1}'),
    "small arrays": listed("[[1]]"),
    "nulls": listed("null"),
    "texts": listed('"some text"'),
    "escapes": listed('"\\u0000\\\\\\""', COUNT // 4),
    "nulls on lines": listed("\nnull"),
    "empty texts": listed('""'),
    "an object of many names": json.dumps({f"{n:x}": n for n in range(COUNT)}).encode(),
}


HOSTILE = {
    "a string of brackets": b'"' + b"[" * COUNT * 5 + b'"',
    "a string of nested brackets": (
        b'{"a":"' + b"[" * COUNT * 5 + b"]" * COUNT * 5 + b'"}'
    ),
    "strings of a bracket": listed('"["'),
    "brackets after a quotation mark": b'{"a":"\\"' + b"[" * COUNT * 5 + b'"}',
    "long fractions": listed("0." + "1" * 997, 1000),
    "long numbers with a zero as fraction": listed("9" * 4000 + ".0", 600),
    "just as long as they may be": listed("9" * MAX_DIGITS + ".0", 1000),
    "fractions of 17 digits": listed("0.12345678901234567", 1000),
}
TEXTS = {
    "a long text": ["some text " * COUNT],
    "a long Latin text": {"text": "é à " * COUNT},
    "a long text of symbols": {"text": "\N{WATCH} " * COUNT},
    "symbols without a space": "\N{WATCH}" * COUNT,
}
SHAPES |= HOSTILE | {
    name: json.dumps(value, ensure_ascii=False).encode()
    for name, value in TEXTS.items()
}


def ratio(run, other, limit):
    """How many times as long ``run`` takes as ``other``, by the least CPU time of
    either in this thread.

    They take turns until the ratio is below ``limit``: what else the machine does can
    only make a turn longer.
    """
    least = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for place, timed in enumerate((run, other)):
            start = time.thread_time_ns()
            timed()
            least[place] = min(least[place], time.thread_time_ns() - start)
        if least[0] < limit * least[1]:
            break
    return least[0] / least[1]


def parsed_and_hashed(body):
    return json.loads(body), hashlib.sha256(body).digest()


def cost(body, **chosen):
    return ratio(lambda: of(body, **chosen), lambda: parsed_and_hashed(body), RATIO)


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_json_costs_a_small_multiple_of_parsing_and_hashing_it(body):
    assert cost(body) < RATIO


@pytest.mark.parametrize(
    "chosen", [{"exclude": {"a.b"}}, {"only": {"a.b"}}], ids=["exclude", "only"]
)
def test_selecting_fields_of_json_costs_the_same(chosen):
    assert cost(b'{"a":%s}' % listed('{"b":1}', COUNT // 5), **chosen) < RATIO


NAMES = {"long": "a" + "[a]" * 800, "short": "[a]" * 33, "places": "[a][1]" * 16}


@pytest.mark.parametrize(
    "exclude",
    [frozenset(), {"a.b"}],
    ids=["everything counts", "something is excluded"],
)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_form_of_bracketed_names_costs_a_small_multiple_of_parsing_and_hashing_it(
    name, exclude
):
    body = "&".join([f"{name}=1"] * 1000)

    def parse_and_hash():
        return (
            parse_qsl(body, keep_blank_values=True),
            hashlib.sha256(body.encode()).digest(),
        )

    assert ratio(lambda: of(body, FORM, exclude=exclude), parse_and_hash, RATIO) < RATIO


@pytest.mark.parametrize(
    "body",
    [listed("a=1&")[1:-1].replace(b",", b""), b"a&" * COUNT],
    ids=["pairs", "names"],
)
def test_a_form_of_too_many_fields_costs_only_its_bytes(body):
    large = body * 5
    assert (
        ratio(lambda: of(large, FORM), lambda: hashlib.sha256(large).digest(), 60) < 60
    )


def memory_of(run):
    tracemalloc.start()
    run()
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_exponents_do_not_use_up_memory():
    body = listed("1e999")
    assert memory_of(lambda: of(body)) < 10 * len(body)


@pytest.mark.parametrize("part", [b".", b"[a]"])
@pytest.mark.parametrize(
    "exclude",
    [frozenset(), {"a.b"}],
    ids=["everything counts", "something is excluded"],
)
def test_a_deeply_nested_name_does_not_use_up_memory(part, exclude):
    body = part * 10_000 + b"=1"
    assert memory_of(lambda: of(body, FORM, exclude=exclude)) < 40 * len(body) + 100_000


def test_fractions_count_by_value_up_to_the_limit():
    assert of(listed("1.50", MAX_FRACTIONS)) == of(listed("1.5", MAX_FRACTIONS))
    assert of(listed("1.50", MAX_FRACTIONS + 1)) != of(listed("1.5", MAX_FRACTIONS + 1))
    with pytest.raises(
        ValueError, match="more than 1000 numbers with a fraction or an exponent"
    ):
        canonical_json(listed("1.5", MAX_FRACTIONS + 1))


def test_more_fields_than_django_takes_count_by_their_bytes():
    for part in ({"content_type": FORM}, {"query": True}):

        def digest(fields, part=part, **limit):
            if "query" in part:
                return of(query=fields, **limit)
            return of(fields, **part, **limit)

        assert digest("a=1&b=2") == digest("b=2&a=1")
        assert digest("a=1&b=2", max_fields=2) == digest("b=2&a=1", max_fields=2)
        assert digest("a=1&b=2", max_fields=1) != digest("b=2&a=1", max_fields=1)
        many = [f"a{n}=" for n in range(1001)]
        assert digest("&".join(many)) != digest("&".join(reversed(many)))
        assert digest("&".join(many), max_fields=None) == digest(
            "&".join(reversed(many)), max_fields=None
        )


def test_a_field_cannot_pass_for_a_query_of_too_many_fields():
    assert of(query="raw=a%26b", max_fields=1) != of(query="a&b", max_fields=1)
