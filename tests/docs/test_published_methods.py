"""The page of published methods names what there is: proposers, elements of the contract, files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from specdec.sdk import Draft, Needs, StepView
from specdec.sdk.extensions import KNOWN
from specdec.sdk.proposer_protocol import LIFECYCLE_METHODS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "published-methods.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and line.count("|") == 6 and not line.startswith(("|---", "| method"))
]
PROPOSERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["specdec.proposers"]
ELEMENTS = {*Needs.model_fields, *StepView.__dataclass_fields__, *Draft.__dataclass_fields__, *LIFECYCLE_METHODS}
ELEMENTS |= {"RequestOptions", *(each.name for each in KNOWN.values())}


def test_there_are_at_least_forty_methods_and_none_twice():
    names = [row[0] for row in ROWS]
    assert len(names) == len(set(names)) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_there_is(row):
    _, source, elements, here, reason = row
    assert source
    assert reason
    assert set(re.findall(r"`(\w+)`", elements)) <= ELEMENTS
    word, _, proposer = here.partition(" ")
    assert word in ("packaged", "example", "expressible", "not")
    if proposer:
        assert word == "packaged"
        assert proposer.strip("`") in PROPOSERS


def test_arxiv_ids_belong_to_one_method_each():
    ids = [arxiv for row in ROWS for arxiv in re.findall(r"\b\d{4}\.\d{5}\b", row[1])]
    assert sorted(ids) == sorted(set(ids))
