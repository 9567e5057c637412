"""One thread for a small model, PyTorch's own number for others, however their weights are laid out."""

from __future__ import annotations

import pytest
import torch

from specdec import LLM
from specdec.core.bench import environment
from specdec.core.bench.environment import set_num_threads


@pytest.mark.parametrize(("limit", "expected"), [(6_000_000, 2), (20_000_000, 1)], ids=["large", "small"])
def test_the_size_of_a_model_counts_its_packed_weights(limit, expected, monkeypatch):
    """The tiny model has 6.6 million weights, of which its parameters keep one million."""
    monkeypatch.setattr(environment, "SMALL_MODEL", limit)
    engine, before = LLM("tiny", max_model_len=64).engine, torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        set_num_threads(None, engine)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
