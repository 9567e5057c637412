"""The faults that `scripts/mutate.py` plants: drawn by a seed alone, each a real change of one function."""

from __future__ import annotations

from scripts.faults import drawn

from specdec.core.cache.state_store import StateStore, _Book

FILE = "core/cache/state_store.py"


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
