"""Whatever stands in a file of prompts, its reader gives rows or refuses it by name, and changes nothing."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import NOT_JSON, VALUES, changed, tree
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.lab.dataset_files import READERS, PromptRow
from specdec.lab.datasets import load_dataset
from specdec.sdk import ConfigError

ROW = {"prompt": "a", "question_id": 1, "category": "x", "turns": ["a"], "task_id": "a/1"}
TALK = {"id": "1", "conversations": [{"from": "human", "value": "a"}]}
OWN = st.sampled_from([{"prompt_token_ids": [1]}, {"messages": [{"role": "user", "content": "a"}]}, {"turns": ["a"]}])
ROWS = OWN.flatmap(changed) | changed(ROW) | changed(TALK) | VALUES
TEXTS = st.one_of(
    NOT_JSON,
    st.lists(ROWS.map(json.dumps), max_size=3).map("\n".join).map(str.encode),
    st.lists(ROWS, max_size=3).map(json.dumps).map(str.encode),
)


def refusal(name, path):
    """The code of the error that reading ends in."""
    try:
        assert all(isinstance(each, PromptRow) for each in READERS[name](path))
    except ConfigError as error:
        return error.code
    return None


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=80, deadline=None)
@given(TEXTS, st.sampled_from([".jsonl", ".parquet", ""]))
def test_no_text_makes_a_reader_raise_what_is_not_ours(name, tmp_path_factory, text, suffix):
    home = tmp_path_factory.mktemp("home")
    path = home / f"prompts{suffix}"
    path.write_bytes(text)
    before = tree(home)
    refusal(name, path)
    assert tree(home) == before


CELLS = [[None], [-1], ["x"], [["x"]], [[None]], [[1]], [{"a": 1}], [b"\xff"], []]


@pytest.mark.parametrize("cells", CELLS, ids=str)
@pytest.mark.parametrize("column", ["question_id", "category", "turns"])
def test_no_cell_makes_a_reader_raise_what_is_not_ours(cells, column, tmp_path):
    columns = {"question_id": ["1"], "category": ["x"], "turns": [["a"]]}
    columns = {name: values[: len(cells)] for name, values in columns.items()} | {column: cells}
    pq.write_table(pa.table(columns), tmp_path / "prompts.parquet")
    before = tree(tmp_path)
    refusal("speed_bench", tmp_path / "prompts.parquet")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("key", ["prompt_id", "category"])
def test_a_name_that_no_file_can_hold_is_refused_with_its_number(key, tmp_path):
    (tmp_path / "prompts").write_text(f'{{"prompt": "a"}}\n{{"prompt": "a", "{key}": "\\ud800"}}\n')
    with pytest.raises(ConfigError, match=r"prompt 2: its id or category is no Unicode text") as raised:
        load_dataset("custom", tmp_path / "prompts")
    assert raised.value.code == "SD-E162"


@pytest.mark.parametrize("target", ["nowhere", "prompts"])
def test_a_link_that_leads_to_no_file_is_refused(target, tmp_path):
    (tmp_path / "prompts").symlink_to(target)
    assert {refusal(name, tmp_path / "prompts") for name in READERS} <= {"SD-E160", "SD-E161", "SD-E162", "SD-E163"}
