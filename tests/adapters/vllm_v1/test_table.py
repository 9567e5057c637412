"""The table "capability x engine" of the docs is what the tests on real engines recorded."""

from __future__ import annotations

import json

from scripts.engine_table import PAGE, RECORD, table, with_table

SHOWN = {
    "A": {"drafts": {"result": "yes", "propose_calls": [3, 4]}, "trees": {"result": "refused", "propose_calls": []}},
    "B": {"laws": {"result": "yes", "propose_calls": [5]}},
}


def test_the_page_holds_the_table_of_the_record():
    page = PAGE.read_text()
    assert with_table(page, json.loads(RECORD.read_text())) == page


def test_a_cell_says_what_was_shown_and_is_empty_where_nothing_was():
    assert table(SHOWN).splitlines() == [
        "| capability | A | B |",
        "|---|---|---|",
        "| drafts | yes (3 + 4 calls) |  |",
        "| trees | refused |  |",
        "| laws |  | yes (5 calls) |",
    ]
