"""A fingerprint costs little more than parsing the request, whatever is sent."""

from __future__ import annotations

import hashlib
import json
import math
import time
import tracemalloc

import pytest

from django_idempotency import fingerprints
from django_idempotency.fingerprints import MAX_FRACTIONS, canonical_json
from tests.unit.test_fingerprints import FORM, of

COUNT = 100_000
RATIO = 6  # measured are 0.2 to 3.6, and 4.9 for nulls with white space between them on Python 3.11
LONG_TEXT_RATIO = 9  # measured are 3 to 7: a long text is hardly more than copied by the parser
ROUNDS = 60


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


LONG_TEXTS = {
    "ASCII": ["some text " * COUNT],
    "Latin": {"text": "é à " * COUNT},
    "symbols": {"text": "\N{WATCH} " * COUNT},
    "without a space": "\N{WATCH}" * COUNT,
}


def ratio(run, other, limit):
    """How many times as long ``run`` takes as ``other``, by the least CPU time of either.

    They take turns until the ratio is below ``limit``: what else the machine does can only make a turn longer.
    """
    least = [math.inf, math.inf]
    for _ in range(ROUNDS):
        for place, timed in enumerate((run, other)):
            start = time.process_time_ns()
            timed()
            least[place] = min(least[place], time.process_time_ns() - start)
        if least[0] < limit * least[1]:
            break
    return least[0] / least[1]


@pytest.mark.parametrize("body", SHAPES.values(), ids=SHAPES)
def test_json_costs_a_small_multiple_of_parsing_it(body):
    assert ratio(lambda: of(body), lambda: json.loads(body), RATIO) < RATIO


@pytest.mark.parametrize("value", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_long_text_costs_little_more_than_its_bytes(value):
    body = json.dumps(value, ensure_ascii=False).encode()
    assert ratio(lambda: of(body), lambda: json.loads(body), LONG_TEXT_RATIO) < LONG_TEXT_RATIO


@pytest.mark.parametrize("body", [listed("a=1&")[1:-1].replace(b",", b""), b"a&" * COUNT], ids=["pairs", "names"])
def test_a_form_of_too_many_fields_costs_no_more_than_its_bytes(body):
    large = body * 5
    assert ratio(lambda: of(large, FORM), lambda: hashlib.sha256(large).digest(), 60) < 60


def memory_of(run):
    tracemalloc.start()
    run()
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_exponents_take_no_memory():
    body = listed("1e999")
    assert memory_of(lambda: of(body)) < 10 * len(body)


@pytest.mark.parametrize("part", [b".", b"[a]"])
@pytest.mark.parametrize("exclude", [frozenset(), {"a.b"}], ids=["everything counts", "something is excluded"])
def test_a_deeply_nested_name_takes_no_memory(part, exclude):
    body = part * 10_000 + b"=1"
    assert memory_of(lambda: of(body, FORM, exclude=exclude)) < 40 * len(body) + 100_000


def test_the_work_that_is_not_the_parsers_is_bounded(monkeypatch):
    read = []
    fraction = fingerprints._fraction
    monkeypatch.setattr(fingerprints, "_fraction", lambda text: read.append(text) or fraction(text))
    of(listed("1e999"))
    assert len(read) == MAX_FRACTIONS


def test_fractions_count_by_value_up_to_the_limit():
    assert of(listed("1.50", MAX_FRACTIONS)) == of(listed("1.5", MAX_FRACTIONS))
    assert of(listed("1.50", MAX_FRACTIONS + 1)) != of(listed("1.5", MAX_FRACTIONS + 1))
    with pytest.raises(ValueError, match="more than 1000 numbers with a fraction or an exponent"):
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
        assert digest("&".join(many), max_fields=None) == digest("&".join(reversed(many)), max_fields=None)


def test_a_field_cannot_pass_for_a_query_of_too_many_fields():
    assert of(query="raw=a%26b", max_fields=1) != of(query="a&b", max_fields=1)
