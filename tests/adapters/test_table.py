"""The page "capability x engine" of the docs is what the tests on real engines recorded."""

from __future__ import annotations

import json

import pytest
from scripts.engine_table import CAPABILITIES, NOT_SHOWN, PAGE, RECORD, page, record_of


def shown(test, *calls, refused=None):
    return {"test": test, "propose_calls": list(calls), "refused": refused}


def test_the_page_is_that_of_the_record():
    assert PAGE.read_text() == page(json.loads(RECORD.read_text())), "python -m scripts.engine_table"


def test_a_cell_says_what_was_shown_by_which_test_or_that_nothing_was():
    record = {
        "A": {
            "host proposers": [shown("t/x.py::b", 3), shown("t/x.py::a[1]", 5)],
            "drafts in trees": [shown("t/x.py::c", refused="x|y")],
        },
        "B": {"host proposers": [shown("t/y.py::d", 1, 2)]},
    }
    lines = page(record).splitlines()
    assert "| capability | A | B |" in lines
    assert '| host proposers | [yes](../../t/x.py "a, 5 calls") | [yes](../../t/y.py "d, 1 calls, 2 calls") |' in lines
    assert f'| drafts in trees | [refused](../../t/x.py "c"): x\\|y | {NOT_SHOWN} |' in lines
    assert f"| pipeline parallelism | {NOT_SHOWN} | {NOT_SHOWN} |" in lines
    assert sum(line.startswith("| ") for line in lines) == 2 + len(CAPABILITIES)


def test_shown_and_refused_is_no_result():
    both = {"A": {"host proposers": [shown("a", 1), shown("b", refused="no")]}}
    with pytest.raises(ValueError, match="a, b"):
        page(both)


def test_notes_of_several_processes_are_a_record_in_the_order_of_tests():
    told = [
        ("A", "drafts in trees", shown("b", 2)),
        ("B", "host proposers", shown("c")),
        ("A", "drafts in trees", shown("a")),
    ]
    notes = [json.dumps({"engine": engine, "capability": capability, **each}) for engine, capability, each in told]
    assert record_of(notes) == {
        "A": {"drafts in trees": [shown("a"), shown("b", 2)]},
        "B": {"host proposers": [shown("c")]},
    }
