"""Mutants of a module: its source with one small change each. Pure.

What is not changed: annotations, docstrings, decorators, assertions, and words for people (in errors and logs).
Statements in SQL are opaque here; they have mutants of their own, written by hand (``statements.toml``).
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
NO_CONTEXT = "__import__('contextlib').nullcontext()"


@dataclass(frozen=True, slots=True)
class Mutant:
    """``module`` is a path below the package; ``where`` the function or class; ``source`` the module as changed."""

    module: str
    where: str
    before: str
    after: str
    source: str
    line: int

    @property
    def name(self) -> str:
        """By what it does, not where: it stays the same while other lines come and go."""
        return f"{self.module} {self.where}: {self.before} => {self.after}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.where}\n  - {self.before}\n  + {self.after}"


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes ``start`` to ``end`` of a source become ``text``."""

    where: str
    start: int
    end: int
    text: str


def mutants(module: str, source: str) -> list[Mutant]:
    """All of them, in the order of the source."""
    found = sorted(_Finder(source).edits(), key=lambda edit: (edit.start, edit.end))
    return [_mutant(module, source, edit) for edit in found]


def replaced(module: str, where: str, source: str, before: str, after: str) -> Mutant:
    """The mutant by hand: ``before``, which is there once, becomes ``after``."""
    if source.count(before) != 1:
        raise ValueError(f"{module} has {before!r} {source.count(before)} times")
    line = source[: source.index(before)].count("\n") + 1
    texts = (" ".join(text.split()) for text in (before, after))
    return Mutant(module, where, *texts, source.replace(before, after), line)


def _mutant(module: str, source: str, edit: Edit) -> Mutant:
    encoded = source.encode()
    changed = (encoded[: edit.start] + edit.text.encode() + encoded[edit.end :]).decode()
    before, after = _difference(source.splitlines(), changed.splitlines())
    return Mutant(module, edit.where, before, after, changed, encoded[: edit.start].count(b"\n") + 1)


def _difference(before: Sequence[str], after: Sequence[str]) -> tuple[str, str]:
    """The lines that are not the same, as one each."""
    first, last = 0, 0
    while before[first] == after[first]:
        first += 1
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    texts = (lines[first : len(lines) - last] for lines in (before, after))
    old, new = (" ".join(line.strip() for line in lines) for lines in texts)
    return old, new


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.bytes = source.encode()
        starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self.starts = starts
        self.names: list[str] = []
        self.found: list[Edit] = []
        self.among_words = False

    def edits(self) -> list[Edit]:
        self.visit(self.tree)
        return self.found

    # --- Places ---

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.bytes[start:end].decode()

    def _change(self, node: ast.AST, text: str) -> None:
        self._edit(*self._span(node), text)

    def _edit(self, start: int, end: int, text: str) -> None:
        self.found.append(Edit(".".join(self.names) or "module", start, end, text))

    def _change_between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """The operator ``old`` that stands between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        pattern = re.escape(old).replace(r"\ ", r"\s+").encode()
        if found := re.search(pattern, self.bytes[start:end]):
            self._edit(start + found.start(), start + found.end(), new)

    # --- Where there is nothing to change ---

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_MatchValue(self, node: ast.MatchValue) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside(node.name, [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body])

    visit_AsyncFunctionDef = visit_FunctionDef

    def _inside(self, name: str, nodes: Sequence[ast.AST]) -> None:
        self.names.append(name)
        for node in nodes:
            self.visit(node)
        self.names.pop()

    # --- Statements ---

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, (ast.Call, ast.Await)):
            self._change(node, "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._change(node, "pass")
        self._visit_words(node)

    def visit_Break(self, node: ast.stmt) -> None:
        self._change(node, "pass")

    visit_Continue = visit_Break

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._change(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._change(node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not isinstance(node.value, ast.Constant) or node.value.value is not None:
                self._change(node.value, "None")
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            if item.optional_vars is None:
                self._change(item.context_expr, NO_CONTEXT)
        self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if isinstance(node.type, ast.Tuple):
            for dropped in node.type.elts:
                kept = [self._text(element) for element in node.type.elts if element is not dropped]
                self._change(node.type, f"({', '.join(kept)},)")
        if not isinstance(node.body[0], ast.Raise):
            self._edit(self._span(node.body[0])[0], self._span(node.body[-1])[1], "raise")
        for statement in node.body:
            self.visit(statement)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._change(node.guard, "True")
        self.generic_visit(node)

    # --- Expressions ---

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._change(test, f"not ({self._text(test)})")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._change(condition, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self._change_between(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for dropped in node.values:
            kept = [f"({self._text(value)})" for value in node.values if value is not dropped]
            self._change(node, word.join(kept))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._change(node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC:
            self._change_between(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._text(node.func)
        if called == "TypeVar":
            return
        for keyword in node.keywords:
            if keyword.arg is not None:
                self._drop(keyword)
        if called.startswith("logger."):
            self._visit_words(node)
        else:
            self.generic_visit(node)

    def _drop(self, keyword: ast.keyword) -> None:
        start, end = self._span(keyword)
        if behind := re.match(rb"\s*,[ ]?", self.bytes[end:]):
            self._edit(start, end + behind.end(), "")
        elif before := re.search(rb",\s*$", self.bytes[:start]):
            self._edit(before.start(), end, "")
        else:
            self._edit(start, end, "")

    def _visit_words(self, node: ast.AST) -> None:
        outer, self.among_words = self.among_words, True
        self.generic_visit(node)
        self.among_words = outer

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self._change(node, str(not value))
            case int(value) | float(value):
                self._change(node, str(value + 1))
            case str() | bytes() if not self.among_words and "\n" not in self._text(node):
                start, _end = self._span(node)
                opening = re.match(rb"[a-zA-Z]*(\"\"\"|'''|\"|')", self.bytes[start:])
                assert opening is not None
                self._edit(start + opening.end(), start + opening.end(), "XX")


def unified(mutant: Mutant, source: str) -> Iterator[str]:
    """The change as a diff."""
    lines = difflib.unified_diff(source.splitlines(), mutant.source.splitlines(), n=2, lineterm="")
    yield f"{mutant.module}:{mutant.line} {mutant.where}"
    yield from [line for line in lines if not line.startswith(("---", "+++"))]
