"""Which changes of the public API are additions and which are breaks: rule 3 of docs/reference/versions.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import griffe

MADE_BY_AUTHORS = {"Draft", "DraftDistribution", "Extension"}  # beside every StrictModel
BASES = ("Proposer", "ProposerBase", "Methods")  # ends of the names of what authors derive from
MADE_BY_THE_ENGINE = {"ProposerConfig", "NetworkSettings"}  # of the StrictModels
OPEN = {"Phase", "DistributionKind"}  # enumerations of which the contract says that members may be added
KINDS = {"classmethod", "staticmethod", "property"}
NUMBERS = {"API_VERSION", "version"}  # they are meant to change
NEW = "new"
REMOVED = "removed"  # the end of what griffe calls it


@dataclass(frozen=True)
class Change:
    """One difference between two stubs."""

    path: str  # of the name, such as "specdec.sdk.Draft.lengths"
    what: str
    breaking: bool

    @property
    def is_new(self) -> bool:
        return self.what == NEW

    @property
    def is_removal(self) -> bool:
        return self.what.endswith(REMOVED)

    def __str__(self) -> str:
        return f"{'breaking' if self.breaking else 'additive'}  {self.path}: {self.what}"


def changes(old: griffe.Module, new: griffe.Module) -> list[Change]:
    """All differences of two parsed stubs but those of their numbers, judged by rule."""
    found = [_removal(each) for each in griffe.find_breaking_changes(old, new) if not _is_of_no_account(each)]
    return sorted({*found, *_differences(old, new)}, key=str)


def _removal(breakage: griffe.Breakage) -> Change:
    parameter = breakage.old_value if isinstance(breakage.old_value, griffe.Parameter) else breakage.new_value
    named = f" {parameter.name}" if isinstance(parameter, griffe.Parameter) else ""
    return Change(breakage.obj.path, breakage.kind.value.lower() + named, breaking=True)


def _is_of_no_account(breakage: griffe.Breakage) -> bool:
    """Whether only a constructor changed that authors do not call."""
    owner = breakage.obj.parent
    return breakage.obj.name == "__init__" and "dataclass" in owner.labels and not _made_by_authors(owner)


def _differences(old: Any, new: Any) -> Iterator[Change]:
    """What griffe does not judge: what was added, and other types, values and kinds of members."""
    for name, member in new.members.items():
        if member.is_alias or (name.startswith("_") and name != "__init__"):
            continue
        if name not in old.members:
            yield Change(member.path, NEW, breaking=not _may_be_added(member))
        elif member.kind == old.members[name].kind:
            yield from _compared(old.members[name], member)


def _compared(old: Any, new: Any) -> Iterator[Change]:
    if new.labels & KINDS != old.labels & KINDS:
        yield Change(new.path, "another kind of method", breaking=True)
    if new.is_class and set(map(str, old.bases)) - set(map(str, new.bases)):
        yield Change(new.path, "other bases", breaking=True)
    if new.is_class or new.is_module:
        yield from _differences(old, new)
    elif new.is_function and not (new.name == "__init__" and "dataclass" in new.parent.labels):
        yield from _signatures(old, new)
    elif new.is_attribute:
        taken = new.parent.is_module or _made_by_authors(new.parent)
        yield from _types(new.path, "type", old.annotation, new.annotation, taken=taken)
        if new.name not in NUMBERS and old.value is not None:
            yield from _types(new.path, "value", old.value, new.value, taken=new.parent.is_module)


def _signatures(old: griffe.Function, new: griffe.Function) -> Iterator[Change]:
    overridden = new.parent is not None and new.parent.is_class and _made_by_authors(new.parent)
    for parameter in new.parameters:
        if parameter.name in old.parameters:
            before = old.parameters[parameter.name].annotation
            yield from _types(new.path, parameter.name, before, parameter.annotation, taken=not overridden)
        elif not parameter.required:  # griffe finds the required ones
            yield Change(new.path, f"new parameter {parameter.name}", breaking=overridden)
    yield from _types(new.path, "result", old.returns, new.returns, taken=overridden)


def _types(path: str, what: str, old: Any, new: Any, *, taken: bool) -> Iterator[Change]:
    """taken: the engine takes such values from authors, so it may take more. Else it gives them, and may give fewer."""
    before, after = _alternatives(str(old)), _alternatives(str(new))
    if before != after:
        kept = before <= after if taken else after <= before
        yield Change(path, f"{what} was {old}, is {new}", breaking=not kept)


def _alternatives(text: str) -> set[str]:
    """The members of a union, and of a Literal."""
    expression = ast.parse(text, mode="eval").body
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
        return _alternatives(ast.unparse(expression.left)) | _alternatives(ast.unparse(expression.right))
    if isinstance(expression, ast.Subscript) and ast.unparse(expression.value) == "Literal":
        inner = expression.slice
        return set(map(ast.unparse, inner.elts if isinstance(inner, ast.Tuple) else [inner]))
    return {ast.unparse(expression)}


def _may_be_added(member: Any) -> bool:
    cls = member.parent
    if cls.is_module:
        return True
    if _is(cls, "Enum"):
        return cls.name in OPEN
    if not _made_by_authors(cls):
        return True
    if member.is_attribute and "property" not in member.labels:
        return member.value is not None and _has_default(str(member.value))
    return not _is(cls, "Protocol")


def _has_default(value: str) -> bool:
    """Whether the value of a field is one: `Field(ge=1)` is none."""
    call = ast.parse(value, mode="eval").body
    if not isinstance(call, ast.Call) or ast.unparse(call.func).lower() != "field":
        return True
    return bool(call.args) or any((each.arg or "").startswith("default") for each in call.keywords)


def _made_by_authors(cls: Any) -> bool:
    """Whether authors make it, implement it or derive from it, and the engine reads or calls it."""
    if cls.name in MADE_BY_THE_ENGINE:
        return False
    return (
        cls.name in MADE_BY_AUTHORS
        or cls.name.endswith(BASES)
        or any(_is(cls, base) for base in ("StrictModel", "Extension"))
    )


def _is(cls: Any, word: str) -> bool:
    return any(word in str(base) for base in cls.bases)
