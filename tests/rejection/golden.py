"""The committed verdicts: `python -m tests.rejection.golden` writes them anew from the float64 specification.

A changed file is a changed sampler: the same seed then gives another text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from specdec.core.rejection import DistributionKind
from specdec.core.rejection.uniforms import draw_uniforms
from specdec.testing.rejection import reference

from .batches import Batch, Shape, random_batch

FILE = Path(__file__).with_name("golden.json")
REQUESTS = 4
NUM_BATCHES = 8
SHAPES = {
    "one_hot": Shape(REQUESTS, 3, 40, kinds=(DistributionKind.ONE_HOT,), filters=False),
    "one_hot_filtered": Shape(REQUESTS, 3, 11, kinds=(DistributionKind.ONE_HOT,)),
    "probs": Shape(REQUESTS, 3, 20, kinds=(DistributionKind.DENSE_PROBS,), filters=False),
    "logits": Shape(REQUESTS, 3, 20, kinds=(DistributionKind.DENSE_LOGITS,), filters=False),
    "sparse": Shape(REQUESTS, 3, 20, kinds=(DistributionKind.SPARSE,), filters=False),
    "mapped": Shape(
        REQUESTS, 3, 20, kinds=(DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS), filters=False, mapped=True
    ),
    "mixed": Shape(REQUESTS, 3, 12),
    "greedy": Shape(REQUESTS, 3, 30, greedy=1.0, filters=False),
}


def batch_of(name: str, seed: int) -> Batch:
    """Float32 logits from torch's CPU generator, which is the same on every platform."""
    return random_batch(1000 + seed, SHAPES[name])


def expected(batch: Batch) -> list[list[int]]:
    exact = replace(batch, logits=batch.logits.double())
    uniforms = draw_uniforms(batch.drafts, batch.sampling)
    return reference.verify(exact.logits, exact.cu_rows, exact.drafts, exact.sampling, uniforms).output_ids.tolist()


def vectors() -> dict[str, list[list[list[int]]]]:
    return {name: [expected(batch_of(name, seed)) for seed in range(NUM_BATCHES)] for name in SHAPES}


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(batches)}" for name, batches in vectors().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
