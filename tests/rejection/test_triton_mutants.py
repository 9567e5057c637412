"""One slip in a kernel is seen: some fixed request then gets another verdict than the specification gives it.

The unmarked mutants are one each of the uniform, the scan, the last tile, the residual, the map and the counter.
"""

# ruff: noqa: E501
from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.rejection import DistributionKind, verify, verify_block

from .batches import Shape, equal, random_batch
from .interpreted import poisoned, quiet
from .mutation import Mutant, mutated

pytestmark = quiet
TILES, RESIDUAL = "kernels/cuda/row_tiles.py", "kernels/cuda/verdict/residual.py"
VERIFY, BLOCK = "kernels/cuda/verdict/standard.py", "kernels/cuda/verdict/block.py"
KERNEL, STATS, FILTER = (f"kernels/cuda/{each}.py" for each in ("verdict/kernel", "row_stats", "row_filter"))


@dataclass(frozen=True)
class Fixture:
    shape: Shape
    tile: int
    seeds: tuple[int, ...] = (0, 1, 2)
    block: bool = False
    ties: bool = False
    flat: bool = False  # a draft is as likely under the target as under its distribution, give or take


BLOCK_SHAPE = Shape(
    6, 4, 5, kinds=(DistributionKind.DENSE_PROBS, DistributionKind.SPARSE), filters=False, greedy=0.0, idle=0.0
)
FIXTURES = {
    "one_hot": Fixture(Shape(4, 3, 21, kinds=(DistributionKind.ONE_HOT,), filters=False, greedy=0.0), 8),
    "greedy": Fixture(Shape(4, 2, 9, greedy=1.0, filters=False), 4, ties=True),
    "probs": Fixture(Shape(4, 2, 11, kinds=(DistributionKind.DENSE_PROBS,), filters=False, greedy=0.0, idle=0.0), 4),
    "logits": Fixture(
        Shape(4, 2, 11, kinds=(DistributionKind.DENSE_LOGITS,), filters=False, greedy=0.0, idle=0.0), 4, seeds=(5, 8)
    ),
    "sparse": Fixture(
        Shape(4, 2, 11, kinds=(DistributionKind.SPARSE,), filters=False, greedy=0.0, idle=0.0), 4, seeds=(17, 0, 1)
    ),
    "mapped": Fixture(
        Shape(4, 2, 11, kinds=(DistributionKind.DENSE_PROBS,), filters=False, greedy=0.0, mapped=True), 4
    ),
    "filters": Fixture(
        Shape(3, 1, 9, kinds=(DistributionKind.ONE_HOT,), greedy=0.0, idle=0.0), 4, seeds=(20, 6, 0, 1, 2)
    ),
    "holes": Fixture(Shape(12, 2, 5, kinds=(DistributionKind.DENSE_PROBS,), filters=False, greedy=0.0, idle=0.0), 8),
    "block": Fixture(BLOCK_SHAPE, 2, (25, 10, 4), block=True, flat=True),
    "block_alone": Fixture(BLOCK_SHAPE, 8, (25, 10, 4), block=True, flat=True),
}

SLICE = [
    Mutant("accept_uniforms_are_output_uniforms", "probs", VERIFY, "position, ACCEPT, turn)", "position, RESAMPLE, turn)"),
    Mutant("tail_tile_not_masked", "one_hot", TILES, "mask=ids < vocab_size, other=OTHER", "mask=ids >= 0, other=OTHER"),
    Mutant("residual_is_p", "probs", RESIDUAL, "(1.0 / mass).to(tl.float32) - q, 0.0", "(1.0 / mass).to(tl.float32) - q * 0.0, 0.0"),
    Mutant("map_of_the_next_id", "mapped", RESIDUAL, "tl.load(batch.distributions.t2d + token)", "tl.load(batch.distributions.t2d + (token + 1) % 11)"),
    Mutant("counter_not_reset", "probs", TILES, "tl.store(counter_ptr, 0)", "tl.store(counter_ptr, 1)"),
    Mutant("scan_includes_the_boundary_before", "one_hot", TILES, "lower = tl.sum(tl.where(lanes == lane - 1", "lower = tl.sum(tl.where(lanes == lane"),
]  # fmt: skip
REST = [
    Mutant("u24", "one_hot", TILES, "(first.to(tl.int64) << 20) | (second.to(tl.int64) >> 12)", "(first.to(tl.int64) >> 29) << 49"),
    Mutant("position_does_not_advance", "one_hot", VERIFY, "position = tl.load(requests.position + request) + depth\n        drawn = uniform(tl.load(requests.seed + request), position, RESAMPLE", "position = tl.load(requests.position + request)\n        drawn = uniform(tl.load(requests.seed + request), position, RESAMPLE"),
    Mutant("seed_of_the_first_request", "one_hot", VERIFY, "uniform(tl.load(requests.seed + request), position, RESAMPLE", "uniform(tl.load(requests.seed), position, RESAMPLE"),
    Mutant("argmax_takes_the_last", "greedy", TILES, "return tl.min(tl.where(values == top, ids, NO_LANE), 0)", "return tl.max(tl.where(values == top, ids, 0), 0)"),
    Mutant("one_tile_too_few", "one_hot", TILES, "live = tiles < num_tiles", "live = tiles < num_tiles - 1"),
    Mutant("row_after_the_stop", "one_hot", KERNEL, "row, maxima, masses, bad = load_row(batch, request, stop, scale, VARIANT)", "row, maxima, masses, bad = load_row(batch, request, tl.maximum(stop - 1, 0), scale, VARIANT)"),
    Mutant("always_accepts", "probs", VERIFY, "accepted = possible & ((prob >= distribution) | (u * distribution < prob))", "accepted = prob >= 0"),
    Mutant("accepts_outside_the_distribution", "sparse", VERIFY, "possible = (prob > 0) & (distribution != 0)", "possible = prob > 0"),
    Mutant("accepts_by_p_alone", "probs", VERIFY, "((prob >= distribution) | (u * distribution < prob))", "(u < prob)"),
    Mutant("abs_for_clamp", "probs", RESIDUAL, "return tl.maximum(weights * (1.0 / mass).to(tl.float32) - q, 0.0, propagate_nan=tl.PropagateNan.ALL)", "return tl.abs(weights * (1.0 / mass).to(tl.float32) - q)"),
    Mutant("distribution_of_the_next_place", "probs", RESIDUAL, "start = tl.where(kind == DENSE_PROBS, at * probs.size, start)", "start = tl.where(kind == DENSE_PROBS, (at - place + (place + 1) % 2) * probs.size, start)"),
    Mutant("draft_logits_not_normalised", "logits", RESIDUAL, "top) * LOG2_E).to(tl.float64) / mass", "top) * LOG2_E).to(tl.float64)"),
    Mutant("sparse_distribution_not_subtracted", "sparse", RESIDUAL, "q += tl.where(ids == token, prob, 0.0)", "q += 0.0"),
    Mutant("mass_outside_the_map_dropped", "mapped", RESIDUAL, "values = tl.load(row_ptr + drafts, mask=known, other=OTHER)", "values = tl.load(row_ptr + drafts, mask=known, other=1.0)"),
    Mutant("no_proposal_verified", "holes", VERIFY, "going = drafted != NO_PROPOSAL", "going = drafted != -3"),
    Mutant("temperature_ignored", "one_hot", STATS, "scale = row_scale(tl.load(temperature_ptr + request))", "scale = row_scale(tl.load(temperature_ptr + request) * 0 + 1.0)"),
    Mutant("top_k_keeps_one_less", "filters", FILTER, "wanted = top_k.to(tl.float64)", "wanted = (top_k - 1).to(tl.float64)"),
    Mutant("min_p_of_probability", "filters", FILTER, "tl.log2(min_p) / scale", "tl.log2(min_p)"),
]  # fmt: skip
REST += [
    Mutant("search_forgets_all_tiles_but_the_first", "filters", FILTER, "for tile in range(num_tiles):\n        if key_of(", "for tile in range(1):\n        if key_of("),
    Mutant("residual_not_scaled_by_survival", "block", BLOCK, "mass = mass / survival", "mass = mass * 1.0"),
    Mutant("uniforms_of_the_plain_rule", "block", VERIFY, "if not VARIANT.block:", "if VARIANT.places:"),
    Mutant("no_look_ahead_mass", "block_alone", BLOCK, "uniform * (mass + 1.0 - survival) < mass", "uniform < survival"),
    Mutant("survival_not_clipped", "block", BLOCK, "tl.minimum(survival * ratio, 1.0), 0.0)", "survival * ratio, 0.0)"),
    Mutant("open_places_left_out", "block", BLOCK, "return (place == 0) | (uniform < survival), uniform, survival", "return place == 0, uniform, survival"),
]  # fmt: skip
CASES = [*SLICE, *(pytest.param(mutant, marks=pytest.mark.full) for mutant in REST)]


def differs(backend: object, fixture: Fixture) -> bool:
    for seed in fixture.seeds:
        batch = random_batch(seed, fixture.shape)
        if fixture.ties:
            batch = replace(batch, logits=batch.logits.round())
        if fixture.flat:
            batch = replace(batch, logits=batch.logits / 5)
        distributions, logits = batch.drafts.distributions, batch.logits
        draft_vocab = (
            0 if distributions is None or distributions.draft_logits is None else distributions.draft_logits.shape[2]
        )
        shape = (*batch.drafts.token_ids.shape, logits.shape[1])
        workspace = poisoned(Workspace.plan(*shape, logits.device, draft_vocab, fixture.tile))
        arguments = (logits, batch.cu_rows, batch.drafts, batch.sampling)
        want = verify_block(*arguments) if fixture.block else verify(*arguments)
        for _ in range(2):  # what the first call leaves behind is part of the second's verdict
            got = backend(*arguments, None, workspace)
            if not equal(got, want) or workspace.counter.any():
                return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("mutant", CASES, ids=lambda mutant: mutant.name)
def test_mutant_of_a_kernel_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with mutated(mutant, tmp_path) as package:
        backend = importlib.import_module(f"{package.__package__.rpartition('.')[0]}.kernels.cuda.verification")
        fixture = FIXTURES[mutant.problem]
        assert differs(partial(backend.verify, together=fixture.block), fixture)
