"""What a proposer saved is read as it was, or refused with SD-E180, whatever somebody made of it."""

from __future__ import annotations

import json

import pytest
from hostile import NOT_JSON, VALUES
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.plugins.suffix.corpus import Corpora
from specdec.plugins.token_recycling.proposer import load_successors
from specdec.sdk import SpecdecError

READERS = {
    "outputs.jsonl": lambda folder: Corpora(8, 8, 64).load(folder, 4096),
    "successors.jsonl": lambda folder: load_successors(folder, 4096),
}
HEADERS = {
    "outputs.jsonl": json.dumps({"format": 2, "vocab_size": 4096}),
    "successors.jsonl": json.dumps({"format": 1, "vocab_size": 4096}),
}
LINES = st.one_of(VALUES.map(json.dumps), st.tuples(st.text(), VALUES).map(json.dumps), st.just("[" * 100_000))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_saved_makes_a_reader_raise_what_is_not_ours(name, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("saved")
    lines = data.draw(st.lists(LINES, max_size=3))
    text = data.draw(NOT_JSON | st.just("\n".join([HEADERS[name], *lines]).encode()))
    (folder / name).write_bytes(text)
    try:
        READERS[name](folder)
    except SpecdecError as error:
        code = error.code
    else:
        code = None
    assert code in ("SD-E180", None)
    assert code is None or text != HEADERS[name].encode()
