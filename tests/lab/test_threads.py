"""One thread for a small model unless the user chose a number, in the engine's steps and nowhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch
from inside import proposer_of, threads_of

from specdec import LLM, SamplingParams
from specdec.core.engine import threads
from specdec.sdk import ConfigError, Draft, StepView

LARGE, SMALL = 6_000_000, 20_000_000  # limits: the tiny model has 6.6 million weights, a million of them parameters
UNLIKELY = 2 * (os.cpu_count() or 1) + 1


class SeesThreads:
    """Keeps what PyTorch has while it drafts."""

    def __init__(self, config):
        self.seen = set()

    def propose(self, step: StepView) -> Draft:
        self.seen.add(torch.get_num_threads())
        return Draft.from_lists([[]] * len(step), step.width)


def in_steps(**settings) -> tuple[set[int], int]:
    """Threads that a step had, and what the process has afterwards."""
    where = {"model": f"{__name__}:SeesThreads", "num_speculative_tokens": 2}
    with LLM("tiny", speculative_config=where, max_model_len=64, **settings) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        return proposer_of(llm).seen, torch.get_num_threads()


@pytest.fixture
def default(monkeypatch) -> Iterator[int]:
    """PyTorch as it starts on a machine of two processors, whatever the machine has."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(("limit", "expected"), [(LARGE, 2), (SMALL, 1)], ids=["large", "small"])
def test_the_size_of_a_model_counts_its_packed_weights(limit, expected, default, monkeypatch):
    monkeypatch.setattr(threads, "SMALL_MODEL", limit)
    assert in_steps() == ({expected}, default)


def test_the_number_is_said_at_the_start(default, caplog):
    with caplog.at_level(logging.INFO, logger="specdec"), LLM("tiny", max_model_len=64):
        pass
    assert sum("computing with 1 CPU thread, not PyTorch's 2" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_a_number_that_is_asked_for_wins(count, default):
    assert in_steps(num_threads=count) == ({count}, default)


@pytest.mark.parametrize("name", threads.VARIABLES)
def test_a_variable_that_libraries_read_wins(name, default, monkeypatch):
    monkeypatch.setenv(name, "2")
    assert in_steps() == ({2}, 2)


def test_a_number_told_to_torch_before_wins(default):
    torch.set_num_threads(UNLIKELY)
    assert in_steps() == ({UNLIKELY}, UNLIKELY)


def test_a_number_told_to_torch_afterwards_wins(default):
    with LLM("tiny", max_model_len=64) as llm:
        assert threads_of(llm).count == 1
        torch.set_num_threads(UNLIKELY)
        assert threads_of(llm).count == UNLIKELY


@pytest.mark.parametrize("count", [0, 100_000])
def test_a_number_out_of_range_is_refused(count):
    with pytest.raises(ConfigError, match="num_threads"):
        LLM("tiny", num_threads=count)
