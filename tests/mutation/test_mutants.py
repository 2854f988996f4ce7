"""The mutants are what they say they are, and the explanations are of mutants that there are."""

from __future__ import annotations

import ast

import pytest

from tests.mutation.__main__ import ROOT, TESTS, all_mutants, explanations
from tests.mutation.mutants import mutants, replaced
from tests.mutation.trials import Touched, changed_function, path_of, plan

CHANGES = {
    "a < b": {"a <= b"},
    "a is not b": {"a is b"},
    "a + b": {"a - b"},
    "a and (b or c)": {"(a)", "(b or c)", "a and ((b))", "a and ((c))"},
    "not a": {"(a)"},
    "1": {"2"},
    "'a'": {"'XXa'"},
    "False": {"True"},
    "f(a, b=c)": {"f(a)"},
    "b if a else c": {"b if not (a) else c"},
    "[a for a in b if c]": {"[a for a in b if True]"},
    "None": set(),
    "f'a{b}'": set(),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.items(), ids=CHANGES)
def test_an_expression_is_changed_in_each_of_its_ways(before, after):
    assert {mutant.after for mutant in mutants("m.py", f"x = {before}\n")} == {f"x = {text}" for text in after}


STATEMENTS = {
    "    f()": {"pass"},
    "    raise E('words')": {"pass"},
    "    return a": {"return None"},
    "    a.b = c": {"pass"},
    "    a += b": {"pass"},
    "    if a:\n        b": {"if not (a):"},
    "    with a:\n        b": {"with __import__('contextlib').nullcontext():"},
    "    try:\n        a\n    except (A, B):\n        b": {"except (A,):", "except (B,):", "raise"},
    "    assert a < 1": set(),
    '    """words"""': set(),
    "    a: Literal['b'] = c": set(),
}


@pytest.mark.parametrize(("before", "after"), STATEMENTS.items(), ids=STATEMENTS)
def test_a_statement_is_changed_in_each_of_its_ways(before, after):
    found = mutants("m.py", f"def g():\n{before}\n")
    assert {mutant.after for mutant in found} == after
    assert {mutant.where for mutant in found} <= {"g"}


def test_a_name_stays_the_same_wherever_in_the_file_the_line_is():
    (here,) = mutants("m.py", "x = 1\n")
    (there,) = mutants("m.py", "# é\n\nx = 1\n")
    assert (here.name, here.line, there.line) == (there.name, 1, 3)


def test_a_mutant_by_hand_is_of_text_that_is_there_once():
    assert replaced("m.py", "w", "a b", "a", "c").source == "c b"
    for source in ("b", "a a"):
        with pytest.raises(ValueError, match="times"):
            replaced("m.py", "w", source, "a", "c")


@pytest.mark.parametrize("module", TESTS)
def test_every_mutant_is_a_module_that_compiles_and_differs(module):
    source = path_of(module).read_text()
    found = all_mutants(module)
    assert found
    for mutant in found:
        assert mutant.source != source
        ast.parse(mutant.source)


def test_what_is_explained_is_a_mutant_that_there_is():
    names = {mutant.name for module in TESTS for mutant in all_mutants(module)}
    assert not explanations().keys() - names
    assert all(explanations().values())


def test_the_tests_that_mutants_are_tried_on_are_there():
    for names in TESTS.values():
        for name in names:
            path, _, test = name.partition("::")
            assert f"def {test}" in (ROOT / "tests" / path).read_text()


# --- How they are tried ----------------------------------------------------------------------------------------------

SOURCE = """
from functools import lru_cache

LIMIT = 1

class Account:
    limit = 2

    @lru_cache
    def draw(self, amount=3):
        return [amount + each for each in range(4)]

def outer():
    def inner():
        return 5
    return inner
"""


@pytest.mark.parametrize(
    ("before", "after", "function"),
    [
        ("amount + each", "amount - each", "Account.draw"),
        ("range(4)", "range(\n5)", "Account.draw"),
        ("return 5", "pass", "outer"),
        ("LIMIT = 1", "LIMIT = 2", None),
        ("limit = 2", "limit = 3", None),
        ("amount=3", "amount=4", None),
        ("@lru_cache", "@print", None),
        ("self, amount", "self, amount, more", None),
    ],
)
def test_a_function_is_exchanged_only_where_nothing_else_is_changed(before, after, function):
    assert SOURCE.count(before) == 1
    assert changed_function(SOURCE, SOURCE.replace(before, after)) == function


ENGINE = path_of("engine.py").read_text().splitlines()
LINE = ENGINE.index("    if record.response is not None:") + 1  # in decide()


def test_a_mutant_of_a_function_is_tried_on_the_tests_that_run_its_statement_the_quickest_first():
    (mutant,) = [mutant for mutant in all_mutants("engine.py") if (mutant.line, mutant.where) == (LINE, "decide")]
    seconds = {"slow": 3.0, "quick": 1.0, "before it": 0.1, "elsewhere": 0.1}
    lines = {"slow": [LINE], "quick": [LINE + 1], "before it": [LINE - 1], "elsewhere": [1]}
    planned = plan(mutant, Touched(seconds, {"engine.py": lines}))
    assert (planned.function, planned.tests) == ("decide", ["quick", "slow"])


def test_a_mutant_of_what_runs_before_the_tests_is_tried_on_all_those_that_run_it_first():
    (mutant,) = [mutant for mutant in all_mutants("engine.py") if (mutant.line, mutant.where) == (LINE, "decide")]
    seconds = {"slow": 3.0, "quick": 1.0, "before it": 0.5, "elsewhere": 0.1}
    lines = {"": [LINE], "slow": [LINE], "quick": [LINE], "before it": [LINE - 1]}
    planned = plan(mutant, Touched(seconds, {"engine.py": lines}))
    assert (planned.function, planned.tests) == (None, ["quick", "slow", "before it", "elsewhere"])
