"""The public names: every change of them is seen, and each is explained."""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path

from scripts import api_snapshot

DOCS = Path(__file__).parents[2] / "docs"
ADVICE = """
The public names have changed. If that is meant: python -m scripts.api_snapshot, a line in CHANGELOG.md, and
API_VERSION in sdk/proposer_protocol.py: a minor for what only adds, a major for anything else.
"""
MODULES = {module.__name__: module for module in api_snapshot.public_modules()}
PUBLIC = {f"{path}.{name}": getattr(module, name) for path, module in MODULES.items() for name in module.__all__}


def test_public_signatures_are_the_committed_ones():
    committed, found = api_snapshot.SNAPSHOT.read_text(), api_snapshot.snapshot()
    changes = difflib.unified_diff(committed.splitlines(), found.splitlines(), "committed", "found", lineterm="", n=0)
    assert committed == found, ADVICE + "\n".join(changes)


def test_the_snapshot_tells_a_changed_parameter_default_field_and_member():
    lines = api_snapshot.SNAPSHOT.read_text().splitlines()
    for line in (
        "specdec.LLM.generate(sampling_params): Params = None",
        "specdec.sdk.Draft.distribution: DraftDistribution | None = None",
        "specdec.sdk.DistributionKind.SPARSE = 3",
        "specdec.sdk.Draft.from_lists: classmethod",
        "specdec.testing.check_proposer(*, level): Level = 'standard'",
    ):
        assert line in lines


def documented():
    """Public classes and functions with their public members, by path."""
    found = {}
    for path, value in PUBLIC.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            found[path] = value
        if inspect.isclass(value):
            members = api_snapshot.public_members(value)
            found |= {f"{path}.{name}": getattr(value, name) for name in members if name != "__init__"}
    return found


def own_docstring(path, value):
    """What was written for it: of a public class its own, not a base's nor what a dataclass makes of its fields."""
    text = (vars(value).get("__doc__") if inspect.isclass(value) and path in PUBLIC else inspect.getdoc(value)) or ""
    return "" if text.startswith(path.rpartition(".")[2] + "(") else text


def test_every_public_name_has_a_docstring():
    assert [path for path, value in documented().items() if not own_docstring(path, value)] == []


def test_every_public_name_has_a_section_in_the_reference():
    pages = {page.name: page.read_text() for page in (DOCS / "reference").glob("*.md")}
    sections = {name for text in pages.values() for name in re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)}
    assert "SamplingParams" in pages["configuration.md"], "its keys are a section of their own"
    assert {path.rpartition(".")[2] for path in PUBLIC} - sections == {"SamplingParams"}
