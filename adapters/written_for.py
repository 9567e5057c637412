"""Whether the engine at hand is one that an adapter was written for.

Its source is read as a text, and nothing of it is imported. So the first process can ask before any runner is loaded,
and `scripts/vllm_fits.py` can ask of a vLLM that is not installed.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specdec.sdk.errors import PluginLoadError, message

Names = Mapping[str, str]
"""By `file:Class.method` or `file:function`, its parameters; by `file:Class` or `file:`, what is read of it."""

logger = logging.getLogger("specdec")


def check_engine(engine: str, found: str, tried: Sequence[str], differing: Sequence[str]) -> None:
    """Raise PluginLoadError SD-E195 if what is relied on differs; warn (SD-W195) of a version that nobody tried.

    found: the engine's version. tried: versions, the newest last. differing: a line for each difference.
    """
    if differing:
        facts = {
            "found": f"{engine} {found}",
            "written for": ", ".join(tried),
            "differs": "\n".join(differing),
            "fix": f"install {engine} {tried[-1]}, or a specdec-sdk written for this one",
        }
        raise PluginLoadError("SD-E195", f"this {engine} is not the one that the adapter was written for", facts)
    if found.partition("+")[0] not in tried:
        facts = {"found": f"{engine} {found}", "tried with": ", ".join(tried)}
        logger.warning("%s", message("SD-W195", f"the adapter was not tried with this {engine}", facts))


def folder_of(package: str) -> Path:
    """Where an engine is installed. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    return Path(spec.submodule_search_locations[0])


def differences(package: Path, parameters: Names, members: Names) -> list[str]:
    """How the package in a folder differs from what is relied on; [] if it does not."""
    sources = _Sources(package)
    lines = []
    for place, expected in parameters.items():
        found = sources.parameters(place)
        if found is None:
            lines.append(f"{place} is gone")
        elif found != expected:
            lines.append(f"{place}({found}), expected ({expected})")
    for place, expected in members.items():
        missing = [name for name in expected.split(", ") if name not in sources.members(place)]
        if missing:
            lines.append(f"{place} has no {', '.join(missing)}")
    return lines


class _Sources:
    """Definitions by `file:Class.method`, `file:function`, `file:Class` or `file:`."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._trees: dict[str, ast.Module | None] = {}

    def parameters(self, place: str) -> str | None:
        """A function's parameters without *args and **kwargs. None means that there is no such function."""
        node = self._find(place)
        if not isinstance(node, ast.FunctionDef):
            return None
        given = node.args
        named = [each.arg for each in (*given.posonlyargs, *given.args)]
        optional = {each.arg for each, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value}
        return ", ".join([*named, *[each.arg for each in given.kwonlyargs if each.arg not in optional]])

    def members(self, place: str) -> set[str]:
        """Names that a class or module defines, imports or assigns, those on `self` included; none if it is gone."""
        node = self._find(place)
        return set() if node is None else {name for each in ast.walk(node) for name in _names(each)}

    def _find(self, place: str) -> ast.AST | None:
        file, _, path = place.partition(":")
        if file not in self._trees:
            source = self._package / file
            self._trees[file] = ast.parse(source.read_text()) if source.is_file() else None
        node: ast.AST | None = self._trees[file]
        for name in filter(None, path.split(".")):
            definitions = [] if node is None else [each for each in ast.iter_child_nodes(node) if _defines(each, name)]
            node = definitions[-1] if definitions else None
        return node


def _defines(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.asname or node.name
