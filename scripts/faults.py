"""Faults that can be planted: one small edit inside one function, drawn by a seed."""

from __future__ import annotations

import ast
import gc
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).parents[1]
OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
Change = Callable[[], None]


@dataclass(frozen=True)
class Fault:
    """One edit of a file."""

    file: str  # from the root of the repository
    function: str  # qualified name of the outermost function
    line: int
    first_line: int  # of the function, its decorators included
    last_line: int
    before: str
    after: str
    node: int  # among those of the function
    variant: int
    occurrence: int  # among those of the function with equal texts

    @property
    def name(self) -> str:
        """The same however lines move."""
        return f"{self.file} {self.function}: {self.before} -> {self.after} #{self.occurrence}"

    @property
    def source(self) -> str:
        """Which code of the function it was found in. Docstrings and comments are none of it."""
        return _digests(self.file)[self.first_line]

    def code(self) -> CodeType:
        """The function with the fault in it."""
        return next(code for code in _codes(self.module_code()) if self.fits(code))

    def module_code(self) -> CodeType:
        """All of the file with the fault in it."""
        tree = _parsed(self.file)
        function = next(each for name, each in _functions(tree) if (name, each.lineno) == self._place(tree))
        _changes(_nodes(function)[self.node])[self.variant]()
        return compile(ast.fix_missing_locations(tree), str(ROOT / self.file), "exec")

    def _place(self, tree: ast.Module) -> tuple[str, int]:
        return next(
            (name, each.lineno)
            for name, each in _functions(tree)
            if name == self.function and _first_line(each) == self.first_line
        )

    def fits(self, code: CodeType) -> bool:
        """Whether this is the function's code, sound or not."""
        return (code.co_qualname, code.co_firstlineno) == (self.function, self.first_line)

    def plant(self) -> bool:
        """Put it into this process, for good. False: nobody has imported the function."""
        known = [
            each
            for each in gc.get_objects()
            if type(each) is FunctionType
            and self.fits(each.__code__)
            and source_of(each.__code__.co_filename) == self.file
        ]
        code = self.code()
        for each in known:
            each.__code__ = code
        return bool(known)


def drawn(files: list[str], seed: int) -> list[Fault]:
    """Every fault of these files, in an order that only the seed and the faults decide."""
    every = [fault for file in files for fault in faults_of(file)]
    return sorted(every, key=lambda fault: hashlib.sha256(f"{seed} {fault.name}".encode()).digest())


def faults_of(file: str) -> Iterator[Fault]:
    """All that can be planted in a file."""
    for name, function in _functions(_parsed(file)):
        seen: Counter[tuple[str, str]] = Counter()
        for place, node in enumerate(_nodes(function)):
            for variant in range(len(_changes(node))):
                before, after = _texts(node, variant)
                if before == after:
                    continue
                seen[before, after] += 1
                lines = getattr(node, "lineno", function.lineno), _first_line(function), function.end_lineno or 0
                yield Fault(file, name, *lines, before, after, place, variant, seen[before, after])


def _texts(node: ast.AST, variant: int) -> tuple[str, str]:
    changed = deepcopy(node)
    _changes(changed)[variant]()
    return ast.unparse(node), ast.unparse(changed)


@cache
def _source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def _digests(file: str) -> dict[int, str]:
    """Of the code of each function, by its first line."""
    return {_first_line(each): digest_of(each) for _, each in _functions(_parsed(file))}


def digest_of(function: ast.FunctionDef) -> str:
    """Of what a function does, however it is described and laid out."""
    for each in ast.walk(function):
        if isinstance(each, ast.FunctionDef) and ast.get_docstring(each) is not None:
            each.body[:1] = [] if each.body[1:] else [ast.Pass()]
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:12]


def _parsed(file: str) -> ast.Module:
    return ast.parse(_source(file))


@cache
def source_of(filename: str) -> str:
    """A file's path from the root of the repository; empty for others'."""
    path = Path(filename).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those that lie in no other."""
    for each in tree.body:
        if isinstance(each, ast.FunctionDef):
            yield prefix + each.name, each
        elif isinstance(each, ast.ClassDef):
            yield from _functions(each, f"{prefix}{each.name}.")


def _nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """What is run when the function is called, but for what only tells of errors."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.arguments) or _tells(node) or _guards(node):
            continue
        found.append(node)
        if isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        elif isinstance(node, ast.FunctionDef):
            waiting += node.body
        else:
            waiting += ast.iter_child_nodes(node)
    return found


def _tells(node: ast.AST) -> bool:
    """Whether it puts an error's text together, or is a text itself."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id in {"facts", "fix", "likely", "message"}
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node).startswith(("logger.", "_logger.", "_LOG"))
    return False


def _guards(node: ast.AST) -> bool:
    """Whether it only says that two iterables are as long as each other."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _changes(node: ast.AST) -> list[Change]:
    """What can be done to a node in its place."""
    kinds: dict[type[ast.AST], Callable[[ast.AST], list[Change]]] = {
        ast.Compare: _of_compare,
        ast.BoolOp: _of_operator,
        ast.BinOp: _of_operator,
        ast.AugAssign: _of_operator,
        ast.Constant: _of_constant,
        ast.If: _of_test,
        ast.While: _of_test,
        ast.IfExp: _of_test,
        ast.comprehension: _of_comprehension,
        ast.Slice: _of_slice,
        ast.Call: _of_call,
        ast.Expr: _of_statement,
        ast.UnaryOp: _of_sign,
    }
    return kinds.get(type(node), lambda _: [])(node)


def _of_compare(node: ast.Compare) -> list[Change]:
    def swap(at: int) -> Change:
        return lambda: node.ops.__setitem__(at, OPPOSITE[type(node.ops[at])]())

    return [swap(at) for at in range(len(node.ops))]


def _of_operator(node: ast.BoolOp | ast.BinOp | ast.AugAssign) -> list[Change]:
    opposite = OPPOSITE.get(type(node.op))
    return [lambda: setattr(node, "op", opposite())] if opposite else []


def _of_constant(node: ast.Constant) -> list[Change]:
    if isinstance(node.value, bool):
        return [lambda: setattr(node, "value", not node.value)]
    return [lambda: setattr(node, "value", node.value + 1)] if isinstance(node.value, int | float) else []


def _of_test(node: ast.If | ast.While | ast.IfExp) -> list[Change]:
    return [lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))]


def _of_comprehension(node: ast.comprehension) -> list[Change]:
    return [node.ifs.clear] if node.ifs else []


def _of_slice(node: ast.Slice) -> list[Change]:
    def moved(bound: str, by: ast.operator) -> Change:
        return lambda: setattr(node, bound, ast.BinOp(getattr(node, bound), by, ast.Constant(1)))

    lower = [moved("lower", ast.Add())] if node.lower else []
    return lower + ([moved("upper", ast.Sub())] if node.upper else [])


def _of_call(node: ast.Call) -> list[Change]:
    changes: list[Change] = []
    if isinstance(node.func, ast.Name) and node.func.id in TWINS:
        changes.append(lambda: setattr(node.func, "id", TWINS[node.func.id]))
    in_any_order = isinstance(node.func, ast.Name) and node.func.id in {"min", "max"}
    if len(node.args) > 1 and not in_any_order and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
        changes.append(lambda: node.args.__setitem__(slice(0, 2), node.args[1::-1]))
    return changes


def _of_statement(node: ast.Expr) -> list[Change]:
    return [lambda: setattr(node, "value", ast.Constant(None))] if isinstance(node.value, ast.Call) else []


def _of_sign(node: ast.UnaryOp) -> list[Change]:
    if isinstance(node.op, ast.Not):
        return [lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), node.operand))]
    is_number = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return (
        [] if is_number else [lambda: setattr(node, "op", ast.UAdd() if isinstance(node.op, ast.USub) else ast.Not())]
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
