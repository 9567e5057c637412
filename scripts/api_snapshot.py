"""Write tests/sdk/api.txt, a line for every public name, parameter and field: python -m scripts.api_snapshot"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

import specdec.adapters
import specdec.sdk

SNAPSHOT = Path(__file__).parents[1] / "tests" / "sdk" / "api.txt"
PLAIN = (bool, int, float, str, tuple, frozenset, type(None))
PARAMETER_MARKS = {
    inspect.Parameter.POSITIONAL_ONLY: "{}, /",
    inspect.Parameter.KEYWORD_ONLY: "*, {}",
    inspect.Parameter.VAR_POSITIONAL: "*{}",
    inspect.Parameter.VAR_KEYWORD: "**{}",
}


def public_modules() -> list[ModuleType]:
    """`specdec`, `specdec.testing`, the contract and the adapters, and what lies below them with an `__all__`."""
    rooms = (specdec.sdk, specdec.adapters)
    below = (found for room in rooms for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."))
    names = ["specdec", "specdec.sdk", "specdec.testing", *(found.name for found in below if found.ispkg)]
    modules = [import_module(name) for name in sorted(names)]
    return [module for module in modules if "__all__" in vars(module)]


def snapshot() -> str:
    """All lines, ordered."""
    lines = (
        line
        for module in public_modules()
        for name in sorted(module.__all__)
        for line in _lines(f"{module.__name__}.{name}", getattr(module, name))
    )
    return "\n".join(lines) + "\n"


def _lines(path: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield f"{path}: class"
        yield from _fields(path, value)
        for name, member in public_members(value).items():
            yield from _member(f"{path}.{name}", member)
    elif inspect.isfunction(value):
        yield from _signature(path, value)
    else:
        yield f"{path} = {_shown(value)}"


def public_members(cls: type) -> dict[str, Any]:
    """Methods, properties and nested classes that a class or one of our own bases of it defines, by name."""
    found: dict[str, Any] = {}
    for base in reversed(_own_bases(cls)):
        found |= {
            name: value
            for name, value in vars(base).items()
            if (name == "__init__" or not name.startswith("_")) and not _is_data(value) and not _is_typings(value)
        }
    if dataclasses.is_dataclass(cls) or issubclass(cls, BaseModel):
        found.pop("__init__", None)  # its parameters are the fields
    return dict(sorted(found.items()))


def _own_bases(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "specdec"]


def _is_data(value: object) -> bool:
    return not isinstance(value, FunctionType | classmethod | staticmethod | property | cached_property | type)


def _is_typings(value: object) -> bool:
    """Whether it is the `__init__` that a protocol without one gets."""
    return isinstance(value, FunctionType) and value.__module__ == "typing"


def _fields(path: str, cls: type) -> Iterator[str]:
    if issubclass(cls, Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in cls)
        return
    annotations = {
        name: text for base in reversed(_own_bases(cls)) for name, text in inspect.get_annotations(base).items()
    }
    for name, annotation in sorted(annotations.items()):
        if not name.startswith("_"):
            yield f"{path}.{name}: {annotation}{_default(cls, name)}"


def _default(cls: Any, name: str) -> str:
    if issubclass(cls, BaseModel) and name in cls.model_fields:
        field = cls.model_fields[name]
        return "" if field.is_required() else f" = {_shown(field.get_default(call_default_factory=True))}"
    value = inspect.getattr_static(cls, name, dataclasses.MISSING)
    return f" = {_shown(value)}" if type(value) in PLAIN else ""


def _shown(value: object) -> str:
    """A value without its address in memory."""
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def _member(path: str, member: Any) -> Iterator[str]:
    if isinstance(member, type):
        yield from _lines(path, member)
    elif isinstance(member, classmethod | staticmethod):
        yield f"{path}: {type(member).__name__}"
        yield from _signature(path, member.__func__, skip=int(isinstance(member, classmethod)))
    elif isinstance(member, FunctionType):
        yield from _signature(path, member, skip=1)
    else:
        getter = member.fget if isinstance(member, property) else member.func
        yield f"{path}: property {inspect.signature(getter).return_annotation}"


def _signature(path: str, function: Callable[..., Any], skip: int = 0) -> Iterator[str]:
    signature = inspect.signature(function)
    yield f"{path}() -> {signature.return_annotation}"
    for parameter in list(signature.parameters.values())[skip:]:
        mark = PARAMETER_MARKS.get(parameter.kind, "{}").format(parameter.name)
        default = "" if parameter.default is parameter.empty else f" = {_shown(parameter.default)}"
        yield f"{path}({mark}): {parameter.annotation}{default}"


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
