"""Words of an old dialect that must not come back, because the field has others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "sdk", "adapters", "testing", "lab", "cli", "plugins", "docs", "examples", "assets/scaffold")
SUFFIXES = (".py", ".toml", ".c", ".h", ".md", ".in")
HISTORY = ROOT / "docs" / "decisions"
INSTEAD = {
    "law": "distribution",
    "coin": "uniform",
    "judge": "verification rule",
    "guest": "proposer",
    "lent": "what the engine provides",
    "stretch": "chunk",
    "told(": "describe(",
}
FORMER = {
    "kept row": "kept token",
    "KeptRows": "KeptTokens",
    "rows_per_pass": "lookahead",
    "num_draft_nodes": "max_nodes",
    "register_datasets": "the entry-point group specdec.datasets",
    "register_metrics_exporters": "the entry-point group specdec.metrics_exporters",
    'topology="': "Trees() in Needs.extensions",
}
"""What the contract called something before it was 1.0."""
ENDINGS = ("", "s", "es", "d")
FRAGMENTS = {"of", "as", "by", "from", "see", "those"}
"""First words of a docstring that cannot be understood without what stands around it."""
PART = re.compile(r"[A-Z]?[a-z]+\(?|[A-Z]+(?![a-z])")  # of an identifier or of a sentence
FILES = [ROOT / "README.md", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*")))]
TEXTS = [path for path in FILES if path.suffix in SUFFIXES and HISTORY not in path.parents]
SOURCES = [path for path in TEXTS if path.suffix == ".py"]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> list[str]:
    """Docstrings that begin with a preposition, refer to a neighbour, or only say where to look."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    texts = [ast.get_docstring(node) or "-" for node in nodes]
    return [text for text in texts if text.split()[0].lower() in FRAGMENTS]


def old_words(text: str) -> dict[str, str]:
    """Those that occur, as a word or as a part of an identifier, each with the word of the field."""
    parts = {part.lower() for part in PART.findall(text)}
    parts |= {part.removesuffix("(") for part in parts}
    return {old: new for old, new in INSTEAD.items() if any(old + ending in parts for ending in ENDINGS)}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_the_words_of_the_field(path: Path) -> None:
    found = old_words(path.read_text(encoding="utf-8"))
    assert not found, f"old words and what to write instead: {found}"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_uses_the_names_of_contract_1(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = {old: new for old, new in FORMER.items() if old.lower() in text.lower()}
    assert not found, f"former names and what to write instead: {found}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_docstring_can_be_understood_alone(path: Path) -> None:
    assert not fragments(path.read_text(encoding="utf-8")), "say what it is or does, with a verb or a noun"


def test_a_docstring_that_is_a_fragment_is_seen() -> None:
    assert fragments('def size():\n    """Of the pool."""') == ["Of the pool."]
    assert not fragments('def size():\n    """The size of the pool."""')


@pytest.mark.parametrize("text", ["DraftLaw", "two coins", "law_of", "judged", "GUEST", "_lent", "x.told()", "law(x)"])
def test_parts_of_identifiers_are_seen(text: str) -> None:
    assert old_words(text)


@pytest.mark.parametrize("text", ["silent", "flaw", "equivalent", "coincide", "told of it"])
def test_other_words_are_left_alone(text: str) -> None:
    assert not old_words(text)
