"""The faults that `scripts/mutate.py` plants: drawn by a seed alone, each a real change of one function."""

from __future__ import annotations

import ast
import subprocess
import sys

from scripts.faults import digest_of, drawn
from scripts.other_processes import NOTED, PLANTED, note_there, noted, plant_there

from specdec.core.cache.block_pool import BlockPool
from specdec.core.cache.state_store import StateStore, _Book

FILE, POOL = "core/cache/state_store.py", "core/cache/block_pool.py"


def test_a_seed_draws_the_same_faults_each_once():
    names = [fault.name for fault in drawn([FILE], 0)]
    assert names == [fault.name for fault in drawn([FILE], 0)] != [fault.name for fault in drawn([FILE], 1)]
    assert len(set(names)) == len(names) > 50


def test_a_fault_changes_the_code_of_its_function_and_no_other(monkeypatch):
    fault = next(each for each in drawn([FILE], 0) if each.before == "generation == self.generation")
    sound = _Book.serves.__code__, StateStore.plan.__code__
    monkeypatch.setattr(_Book.serves, "__code__", sound[0])  # put back afterwards
    assert _Book(1, 4, 2).serves(1, 5)
    assert fault.plant()
    assert not _Book(1, 4, 2).serves(1, 5)
    assert StateStore.plan.__code__ is sound[1]


def test_a_verdict_holds_until_the_code_changes_and_not_its_description():
    texts = [
        "def f(x):\n    return x + 1",
        "def f(x):\n    '''More.'''\n    return (x + 1)  # one",
        "def f(x):\n    return x",
    ]
    first, described, changed = (digest_of(ast.parse(text).body[0]) for text in texts)
    assert first == described != changed


def test_a_process_that_is_started_has_the_fault_and_notes_its_lines(monkeypatch, tmp_path):
    for name in ("PYTHONPATH", PLANTED, NOTED):
        monkeypatch.setenv(name, "")  # put back afterwards
    plant_there(next(each for each in drawn([POOL], 0) if each.before == "self.num_free += 1"))
    note_there(tmp_path / "lines")
    code = (
        "from specdec.core.cache.block_pool import BlockPool\n"
        "pool, blocks = BlockPool(4, 16, 2), []\n"
        "pool.extend(blocks, 16), pool.release(blocks)\n"
        "print(pool.num_free)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "2", said.stderr
    assert BlockPool.release.__code__.co_firstlineno in noted(tmp_path / "lines")[POOL]
