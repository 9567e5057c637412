"""The public names: every change of them is seen, and each is explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts import api_check, api_stub

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def package():
    return api_stub.load()


@pytest.mark.slow
def test_the_numbers_of_the_contract_are_raised_as_its_changes_demand(capsys):
    assert api_check.main([]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_the_stub_tells_parameters_defaults_fields_members_and_kinds(package):
    lines = [line.strip() for line in api_stub.stub(package).splitlines()]
    for line in (
        "def update_proposer_weights(self, tensors: Mapping[str, Tensor]) -> None: ...",
        "distribution: DraftDistribution | None = None",
        "SPARSE = 3",
        "history: bool = Field(default=False)",
    ):
        assert line in lines
    assert (
        lines[lines.index("def from_lists(cls, drafts: Sequence[Sequence[int]], width: int) -> Draft: ...") - 1]
        == "@classmethod"
    )


def public(package):
    """Public names by path, as they are declared."""
    modules = api_stub.public_modules(package)
    return {f"{module.path}.{name}": target(module[name]) for module in modules for name in module.exports}


def target(member):
    return member.final_target if member.is_alias else member


def explained(package):
    """Public classes and functions, and the public members of the classes, by path."""
    for path, value in public(package).items():
        if value.is_class or value.is_function:
            yield path, value
        if value.is_class:
            for name, member in value.all_members.items():
                declared = target(member)
                own = declared.path.startswith("specdec.") and not name.startswith("_")
                if own and (declared.is_function or declared.is_class or "property" in declared.labels):
                    yield f"{path}.{name}", declared


def test_every_public_name_has_a_docstring(package):
    assert [path for path, value in explained(package) if not value.has_docstring] == []


def test_every_public_name_has_a_section_in_the_reference(package):
    pages = {page.name: page.read_text() for page in (DOCS / "reference").glob("*.md")}
    sections = {name for text in pages.values() for name in re.findall(r"^### (\w+)$", text, flags=re.MULTILINE)}
    assert "SamplingParams" in pages["configuration.md"], "its keys are a section of their own"
    assert {path.rpartition(".")[2] for path in public(package)} - sections == {"SamplingParams"}
