"""One slip in a kernel is seen: some fixed request then gets another verdict than the specification gives it.

The unmarked mutants are one each of the coin, the scan, the last tile, the residual, the map and the counter.
"""

# ruff: noqa: E501
from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from specdec.core.rejection import LawKind, verify
from specdec.core.rejection.workspace import Workspace

from .batches import Shape, random_batch
from .interpreted import poisoned, quiet
from .mutation import Mutant, mutated

pytestmark = quiet
TILES, RESIDUAL = "kernels/row_tiles.py", "kernels/verdict/residual.py"
KERNEL, STATS, FILTER = "kernels/verdict/kernel.py", "kernels/row_stats/kernel.py", "kernels/row_filter/kernel.py"


@dataclass(frozen=True)
class Fixture:
    shape: Shape
    tile: int
    seeds: tuple[int, ...] = (0, 1, 2)


FIXTURES = {
    "one_hot": Fixture(Shape(4, 3, 21, kinds=(LawKind.ONE_HOT,), filters=False, greedy=0.0), 8),
    "greedy": Fixture(Shape(4, 2, 9, greedy=1.0, filters=False), 4),
    "probs": Fixture(Shape(4, 2, 11, kinds=(LawKind.DENSE_PROBS,), filters=False, greedy=0.0, idle=0.0), 4),
    "logits": Fixture(Shape(4, 2, 11, kinds=(LawKind.DENSE_LOGITS,), filters=False, greedy=0.0, idle=0.0), 4),
    "sparse": Fixture(Shape(4, 2, 11, kinds=(LawKind.SPARSE,), filters=False, greedy=0.0, idle=0.0), 4),
    "mapped": Fixture(Shape(4, 2, 11, kinds=(LawKind.DENSE_PROBS,), filters=False, greedy=0.0, mapped=True), 4),
    "filters": Fixture(Shape(3, 1, 9, kinds=(LawKind.ONE_HOT,), greedy=0.0, idle=0.0), 8),
}

SLICE = [
    Mutant("accept_coins_are_output_coins", "probs", KERNEL, "position, ACCEPT, 0)", "position, RESAMPLE, 0)"),
    Mutant("tail_tile_not_masked", "one_hot", TILES, "mask=ids < vocab_size, other=OTHER", "mask=ids >= 0, other=OTHER"),
    Mutant("residual_is_p", "probs", RESIDUAL, "law = load_law(law_ptr, laws.probs.size,", "unused = load_law(law_ptr, laws.probs.size,"),
    Mutant("map_of_the_next_id", "mapped", RESIDUAL, "tl.load(laws.t2d + token)", "tl.load(laws.t2d + (token + 1) % 11)"),
    Mutant("counter_not_reset", "probs", KERNEL, "tl.store(counter_ptr, 0)", "tl.store(counter_ptr, 1)"),
    Mutant("scan_includes_the_boundary_before", "one_hot", TILES, "lower = tl.sum(tl.where(lanes == lane - 1", "lower = tl.sum(tl.where(lanes == lane"),
]  # fmt: skip
REST = [
    Mutant("u24", "one_hot", TILES, "(first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)", "(first.to(tl.int64) >> 29) << 49"),
    Mutant("position_does_not_advance", "one_hot", KERNEL, "position = tl.load(requests.position + request) + place\n        coin = uniform(tl.load(requests.seed + request), position, RESAMPLE", "position = tl.load(requests.position + request)\n        coin = uniform(tl.load(requests.seed + request), position, RESAMPLE"),
    Mutant("seed_of_the_first_request", "one_hot", KERNEL, "uniform(tl.load(requests.seed + request), position, RESAMPLE", "uniform(tl.load(requests.seed), position, RESAMPLE"),
    Mutant("argmax_takes_the_last", "greedy", TILES, "return tl.min(tl.where(values == top, ids, NO_LANE), 0)", "return tl.max(tl.where(values == top, ids, 0), 0)"),
    Mutant("one_tile_too_few", "one_hot", TILES, "live = tiles < num_tiles", "live = tiles < num_tiles - 1"),
    Mutant("row_after_the_stop", "one_hot", KERNEL, "row, maxima, masses, bad = load_row(rows, request, stop, scale, VARIANT)\n    token", "row, maxima, masses, bad = load_row(rows, request, tl.maximum(stop - 1, 0), scale, VARIANT)\n    token"),
    Mutant("always_accepts", "probs", KERNEL, "accepted = (prob > 0) & ((prob >= law) | (u * law < prob))", "accepted = prob >= 0"),
    Mutant("accepts_by_p_alone", "probs", KERNEL, "((prob >= law) | (u * law < prob))", "(u < prob)"),
    Mutant("abs_for_clamp", "probs", RESIDUAL, "return tl.maximum(weights * (1.0 / mass).to(tl.float32) - law, 0.0, propagate_nan=tl.PropagateNan.ALL)", "return tl.abs(weights * (1.0 / mass).to(tl.float32) - law)"),
    Mutant("law_of_the_next_place", "probs", RESIDUAL, "law_ptr = laws.probs.table + request * laws.probs.stride + place * laws.probs.step", "law_ptr = laws.probs.table + request * laws.probs.stride + ((place + 1) % 2) * laws.probs.step"),
    Mutant("draft_logits_not_normalised", "logits", RESIDUAL, "top) * LOG2_E).to(tl.float64) / mass", "top) * LOG2_E).to(tl.float64)"),
    Mutant("sparse_law_not_subtracted", "sparse", RESIDUAL, "residual - tl.load(law.probs + at).to(tl.float32)", "residual"),
    Mutant("sparse_masses_of_p", "sparse", RESIDUAL, "left = masses / mass - tl.sum(tl.where(inside, taken[None, :], 0.0), 1)", "left = masses / mass"),
    Mutant("mass_outside_the_map_dropped", "mapped", RESIDUAL, "values = tl.load(row_ptr + drafts, mask=known, other=OTHER)", "values = tl.load(row_ptr + drafts, mask=known, other=1.0)"),
    Mutant("no_proposal_judged", "probs", KERNEL, "going = drafted != NO_PROPOSAL", "going = drafted != -3"),
    Mutant("temperature_ignored", "one_hot", STATS, "scale = row_scale(tl.load(temperature_ptr + request))", "scale = row_scale(tl.load(temperature_ptr + request) * 0 + 1.0)"),
    Mutant("top_k_keeps_one_less", "filters", FILTER, "floor, top_k.to(tl.float64)", "floor, (top_k - 1).to(tl.float64)"),
    Mutant("min_p_of_probability", "filters", FILTER, "tl.log2(min_p) / scale", "tl.log2(min_p)"),
    Mutant("top_p_before_the_others", "filters", FILTER, "amounts = tl.where(values >= cutoff, tl.exp2((values - top) * scale), 0.0)", "amounts = tl.exp2((values - top) * scale)"),
]  # fmt: skip
CASES = [*SLICE, *(pytest.param(mutant, marks=pytest.mark.full) for mutant in REST)]


def differs(backend: object, fixture: Fixture) -> bool:
    for seed in fixture.seeds:
        batch = random_batch(seed, replace(fixture.shape))
        laws, logits = batch.drafts.laws, batch.logits
        draft_vocab = 0 if laws is None or laws.logits is None else laws.logits.shape[2]
        shape = (*batch.drafts.token_ids.shape, logits.shape[1])
        workspace = poisoned(Workspace.plan(*shape, logits.device, draft_vocab, fixture.tile))
        arguments = (logits, batch.cu_rows, batch.drafts, batch.sampling)
        want = verify(*arguments)
        for _ in range(2):  # what the first call leaves behind is part of the second's verdict
            got = backend(*arguments, None, workspace)
            if not torch.equal(got.output_ids, want.output_ids) or not torch.equal(got.status, want.status):
                return True
            if workspace.counter.any():
                return True
    return False


@pytest.mark.parametrize("mutant", CASES, ids=lambda mutant: mutant.name)
def test_mutant_of_a_kernel_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        backend = importlib.import_module(f"{package.__name__}.triton_backend")
        assert differs(backend.verify, FIXTURES[mutant.problem])
