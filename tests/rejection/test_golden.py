"""256 committed requests give the committed tokens through every backend.

Through the interpreted kernels the unmarked test takes one batch of each of the eight shapes; the others are marked.
"""

from __future__ import annotations

import json

import pytest

from .golden import FILE, NUM_BATCHES, SHAPES, batch_of, expected
from .interpreted import quiet, with_tile

GOLDEN = json.loads(FILE.read_text())
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, NUM_BATCHES))]


def test_there_are_256_requests() -> None:
    assert sum(len(tokens) for batches in GOLDEN.values() for tokens in batches) == 256


@pytest.mark.parametrize("name", SHAPES)
def test_specification_and_torch_backend_give_the_committed_tokens(name: str) -> None:
    for seed in range(NUM_BATCHES):
        batch = batch_of(name, seed)
        assert expected(batch) == GOLDEN[name][seed]
        assert batch.verify().output_ids.tolist() == GOLDEN[name][seed]


@quiet
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_give_the_committed_tokens(name: str, seed: int) -> None:
    batch = batch_of(name, seed)
    verdict = with_tile(16)(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    assert verdict.output_ids.tolist() == GOLDEN[name][seed]
