"""The batched backend gives the tokens of the specification for the same uniforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.row_distribution import RowDistribution, row_distribution
from specdec.core.rejection import (
    DistributionKind,
    Uniforms,
    Verdict,
    layout,
    torch_backend,
    verify,
)
from specdec.core.rejection.uniforms import draw_uniforms
from specdec.testing.rejection import reference

from .batches import Batch, Shape, equal, random_batch
from .mutation import copied

BOUNDARY = 1e-6
SHAPES = {
    "mixed": Shape(),
    "one_hot": Shape(kinds=(DistributionKind.ONE_HOT,)),
    "mapped": Shape(
        mapped=True, kinds=(DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS)
    ),
    "greedy": Shape(greedy=1.0),
    "tiles": Shape(vocab_size=300, num_requests=4),
    "one_token": Shape(vocab_size=1, num_requests=4),
    "wide_drafts": Shape(num_drafts=9, num_requests=3),
}
NUM_BATCHES = 25


@dataclass(frozen=True)
class Comparison:
    """Requests compared, and those that differ with and without a uniform on a boundary."""

    compared: int
    excused: int
    different: list[int]


def compare(batch: Batch, backend: Callable[..., Verdict] = verify) -> Comparison:
    got = backend(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    exact = replace(batch, logits=batch.logits.double())
    uniforms = draw_uniforms(batch.drafts, batch.sampling)
    want = reference.verify(exact.logits, exact.cu_rows, exact.drafts, exact.sampling, uniforms)
    differs = (got.output_ids != want.output_ids).any(1) | (got.status != want.status)
    excused = differs & (_on_a_boundary(exact, uniforms, want.output_ids) if differs.any() else differs)
    return Comparison(batch.num_requests, int(excused.sum()), (differs & ~excused).nonzero().flatten().tolist())


def _on_a_boundary(batch: Batch, uniforms: Uniforms, output_ids: Tensor) -> Tensor:
    moved = torch.zeros(batch.num_requests, dtype=torch.bool)
    for shift in (-BOUNDARY, BOUNDARY):
        accept = None if uniforms.accept is None else uniforms.accept + shift
        for shifted in (Uniforms(uniforms.output + shift, uniforms.accept), Uniforms(uniforms.output, accept)):
            near = reference.verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, shifted)
            moved |= (near.output_ids != output_ids).any(1)
    return moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_same_tokens_for_same_uniforms(shape: Shape, dtype: torch.dtype) -> None:
    results = [compare(random_batch(seed, replace(shape, dtype=dtype))) for seed in range(NUM_BATCHES)]
    assert [r.different for r in results] == [[]] * NUM_BATCHES
    assert sum(r.excused for r in results) <= 1e-4 * sum(r.compared for r in results)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_reading_one_place_at_a_time_changes_no_token(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [random_batch(seed, shape) for seed in range(NUM_BATCHES)]
    for batch in batches[::3]:
        batch.logits[:: 1 + len(batch.logits) % 4, 0] = torch.nan
    at_once = [batch.verify() for batch in batches]
    monkeypatch.setattr(layout, "LOGITS_AT_ONCE", 1)
    assert all(equal(batch.verify(), verdict) for batch, verdict in zip(batches, at_once, strict=True))


def test_verify_reads_no_places_after_the_first_that_stops_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def recording(*arguments: object, **options: object) -> RowDistribution:
        read.extend(arguments[4].tolist())
        return row_distribution(*arguments, **options)

    monkeypatch.setattr(layout, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(torch_backend, "row_distribution", recording)
    for seed in range(NUM_BATCHES):
        batch = random_batch(seed, Shape(num_drafts=6))
        read.clear()
        verdict = batch.verify()
        emitted = (verdict.output_ids >= 0).sum(1)
        wanted = [
            first + i for first, n in zip(batch.cu_rows.tolist(), emitted.tolist(), strict=False) for i in range(n)
        ]
        assert sorted(read) == wanted


def as_on_a_device(path: str, text: str) -> str:
    """The source with every branch taken that avoids reading values on the host."""
    return text.replace('device.type == "cpu"', 'device.type == "none"').replace(
        'device.type != "cpu"', 'device.type != "none"'
    )


def test_path_without_host_reads_gives_the_same_verdicts(tmp_path: Path) -> None:
    """What runs on a device that must not wait for the host, here on the CPU; bad rows among the others."""
    with copied("as_on_a_device", as_on_a_device, tmp_path) as package:
        for name, shape in SHAPES.items():
            for seed in range(15):
                batch = random_batch(seed, shape)
                if seed % 3 == 0 and len(batch.logits):
                    batch.logits[:: 1 + seed % 4, 0] = torch.nan
                verdict = package.verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
                assert equal(verdict, batch.verify()), (name, seed)


@pytest.mark.parametrize(("num_requests", "places"), [(1, 4), (2, 2), (4, 1), (9, 1)])
def test_of_many_logits_one_place_is_read_at_a_time_and_of_few_several(num_requests: int, places: int) -> None:
    logits = torch.empty(0, layout.LOGITS_AT_ONCE // 4)
    assert layout.places_at_once(logits, num_requests, 9) == places
