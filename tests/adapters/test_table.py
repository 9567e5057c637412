"""The page "capability x engine" of the docs is what the tests on real engines recorded."""

from __future__ import annotations

import json

import pytest
from scripts.engine_table import CAPABILITIES, NOT_SHOWN, PAGE, RECORD, page


def shown(test, *calls, refused=None):
    return {"test": test, "propose_calls": list(calls), "refused": refused}


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text() == page(json.loads(RECORD.read_text())), "python -m scripts.engine_table"


def test_a_cell_says_what_was_shown_by_which_test_or_that_nothing_was():
    record = {
        "A": {"host proposers": [shown("b", 3, 4), shown("a", 5)], "drafts in trees": [shown("c", refused="x|y")]},
        "B": {"host proposers": [shown("d", 1)]},
    }
    lines = page(record).splitlines()
    assert "| capability | A | B |" in lines
    assert "| host proposers | yes[^1] | yes[^2] |" in lines
    assert f"| drafts in trees | refused: x\\|y[^3] | {NOT_SHOWN} |" in lines
    assert f"| pipeline parallelism | {NOT_SHOWN} | {NOT_SHOWN} |" in lines
    assert lines[-3:] == ["[^1]: `a` (5 calls), `b` (3 + 4 calls)", "[^2]: `d` (1 calls)", "[^3]: `c`"]
    assert sum(line.startswith("| ") for line in lines) == 1 + len(CAPABILITIES)


def test_shown_and_refused_is_no_result():
    both = {"A": {"host proposers": [shown("a", 1), shown("b", refused="no")]}}
    with pytest.raises(ValueError, match="a, b"):
        page(both)
