"""The Triton backend gives the tokens of the specification for the same seeds, whatever the tiles and splits.

The unmarked tests take, of each shape of batch, two batches of four requests in one dtype each: every kind of
distribution, with and without a vocabulary map, filters, greedy rows, sentinels, idle requests, one tile and several,
a ragged last tile, given and drawn uniforms. The marked ones are the same over more seeds, dtypes and tile widths.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.rejection import STATUS_BAD_ROW, DistributionKind, Uniforms, plan, sample, verify, verify_block
from specdec.core.rejection.uniforms import draw_uniforms

from .batches import Batch, Shape, equal, random_batch, select, tensors_of
from .interpreted import Verify, blockwise, poisoned, quiet, with_tile, workspace_for
from .test_against_reference import compare

pytestmark = quiet
DISTRIBUTIONS = (DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS)
SHAPES = {
    "one_hot": (Shape(kinds=(DistributionKind.ONE_HOT,), filters=False, vocab_size=40), torch.bfloat16, 16),
    "reported": (Shape(filters=False, greedy=0.1), torch.float32, 4),
    "filtered": (
        Shape(kinds=(DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS), vocab_size=9),
        torch.float32,
        16,
    ),
    "mapped": (Shape(mapped=True, kinds=DISTRIBUTIONS, filters=False), torch.float16, 8),
    "greedy": (Shape(greedy=1.0, filters=False), torch.bfloat16, 4),
    "two_tiles": (Shape(vocab_size=257, num_drafts=2, filters=False, idle=0.0), torch.float32, 256),
    "one_token": (Shape(vocab_size=1), torch.float32, 8),
}
SEEDS = dict.fromkeys(SHAPES, range(2, 7)) | {"filtered": range(2, 4)}
"""An interpreted filter takes a second for each row. `test_kernels.py` has its cutoffs in each dtype."""


def small(name: str, seed: int) -> tuple[Batch, int]:
    shape, dtype, tile = SHAPES[name]
    return random_batch(seed, replace(shape, num_requests=4, dtype=dtype)), tile


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_same_verdict_as_the_torch_backend_and_the_reference(name: str) -> None:
    for seed in (0, 1):
        batch, tile = small(name, seed)
        got = with_tile(tile)(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        assert compare(batch, lambda *arguments, got=got: got).different == []
        assert equal(got, batch.verify())


@pytest.mark.slow
@pytest.mark.parametrize("tile", [4, 16], ids=["shared", "alone"])
def test_same_verdict_of_the_block_rule_as_the_torch_form(tile: int) -> None:
    """A request of several tiles is shared by programs, which make every residual that may be wanted."""
    for seed in (0, 1):
        batch = random_batch(seed, Shape(num_requests=4, greedy=0.1, filters=tile == 16))
        arguments = (batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        assert equal(with_tile(tile, blockwise)(*arguments), verify_block(*arguments))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["reported", "filtered", "mapped", "greedy"])
def test_same_verdict_of_the_block_rule_over_many_seeds(name: str, dtype: torch.dtype) -> None:
    shape, _, tile = SHAPES[name]
    for seed in SEEDS[name]:
        batch = random_batch(seed, replace(shape, dtype=dtype))
        arguments = (batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        assert equal(with_tile(tile, blockwise)(*arguments), verify_block(*arguments))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_same_tokens_over_many_seeds(name: str, dtype: torch.dtype) -> None:
    shape, _, tile = SHAPES[name]
    results = [compare(random_batch(seed, replace(shape, dtype=dtype)), with_tile(tile)) for seed in SEEDS[name]]
    assert [r.different for r in results] == [[]] * len(results)
    assert sum(r.excused for r in results) <= 1e-4 * sum(r.compared for r in results)


@pytest.mark.parametrize("tile", [4, pytest.param(8, marks=pytest.mark.full), pytest.param(64, marks=pytest.mark.full)])
def test_tiles_and_splits_change_no_token(tile: int) -> None:
    """With a tile of 4 a request of 11 tokens has three programs, with 16 one."""
    batch, _ = small("reported", 3)
    arguments = (batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    assert equal(with_tile(tile)(*arguments), with_tile(16)(*arguments))


def test_given_uniforms_are_those_of_the_seeds() -> None:
    batch, tile = small("reported", 5)
    arguments = (batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    uniforms = draw_uniforms(batch.drafts, batch.sampling)
    assert equal(with_tile(tile)(*arguments, uniforms), with_tile(tile)(*arguments))


@pytest.mark.slow
def test_workspace_of_a_larger_plan_is_used_again_and_again_without_a_trace() -> None:
    """Poisoned between calls; the arrival counters alone must be left as they were found: at zero."""
    workspace = Workspace.plan(9, 5, 40, torch.device("cpu"), 40, tile=4)
    for seed in (6, 7):
        batch, _ = small("reported", seed)
        arguments = (batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
        first = triton_backend.verify(*arguments, None, poisoned(workspace))
        kept = replace(first, **{k: v.clone() for k, v in vars(first).items() if isinstance(v, torch.Tensor)})
        assert not workspace.counter.any()
        assert equal(triton_backend.verify(*arguments, None, poisoned(workspace)), kept)
        assert equal(kept, batch.verify())


def test_workspace_that_is_too_small_is_refused() -> None:
    batch, tile = small("one_hot", 0)
    workspace = Workspace.plan(2, 3, 40, torch.device("cpu"), tile=tile)
    with pytest.raises(ValueError, match="plan a larger one"):
        triton_backend.verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, None, workspace)


class Recorder(TorchDispatchMode):
    """Names of the tensor operations that the host asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


VIEWS = {"aten.view.default", "aten.slice.Tensor", "aten.detach.default", "aten.alias.default"}


@pytest.mark.parametrize("rule", [triton_backend.verify, blockwise], ids=["one_by_one", "block"])
@pytest.mark.parametrize("name", SHAPES)
def test_call_with_a_workspace_allocates_nothing_and_reads_nothing(
    name: str, rule: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launches are left out here: what remains is all that the host does, and it may only take views."""
    batch, tile = small(name, 1)
    workspace = workspace_for(batch.logits, batch.drafts, tile)
    for launch in ("row_stats", "draft_stats", "filter_rows"):
        monkeypatch.setattr(triton_backend, launch, lambda *arguments, **options: None)
    launches = defaultdict[object, Callable[..., None]](lambda: lambda *arguments, **options: None)
    monkeypatch.setattr(triton_backend, "verdict_kernel", launches)
    with Recorder() as recorder:
        rule(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, None, workspace)
    assert recorder.names <= VIEWS


@pytest.mark.parametrize("call", [lambda x: x.item(), lambda x: x + 1, lambda x: x.cpu().clone(), torch.empty_like])
def test_recorder_notices_reads_and_allocations(call: Callable[[Tensor], object]) -> None:
    with Recorder() as recorder:
        call(torch.ones(()))
    assert not recorder.names <= VIEWS


def test_device_without_kernels_plans_no_memory() -> None:
    assert plan(4, 3, 40, torch.device("cpu")) is None


def test_inputs_are_not_modified() -> None:
    batch, tile = small("reported", 8)
    before = [tensor.clone() for tensor in tensors_of(batch)]
    with_tile(tile)(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(batch), before, strict=True))


def test_strided_rows_and_poison_around_them_change_no_token() -> None:
    batch, tile = small("one_hot", 2)
    num_rows, vocab_size = batch.logits.shape
    store = torch.full((num_rows + 1, vocab_size + 5), torch.nan, dtype=batch.logits.dtype)
    store[1:, 3 : 3 + vocab_size] = batch.logits
    strided = replace(batch, logits=store[1:, 3 : 3 + vocab_size])
    assert compare(strided, with_tile(tile)).different == []


def test_order_and_company_of_requests_change_no_bit() -> None:
    batch, tile = small("reported", 9)
    order = torch.tensor([2, 0])
    whole = with_tile(tile)(batch.logits, batch.cu_rows, batch.drafts, batch.sampling)
    few = select(batch, order)
    part = with_tile(tile)(few.logits, few.cu_rows, few.drafts, few.sampling)
    assert torch.equal(part.output_ids, whole.output_ids[order])
    assert torch.equal(part.status, whole.status[order])


NAN, INF = math.nan, math.inf
BAD_ROWS = [
    [1.0, NAN, 5.0, 2.0],
    [NAN] * 4,
    [-INF] * 4,
    [1.0, INF, 5.0, INF],
    [NAN, -INF, -INF, -INF],
]


@pytest.mark.parametrize("skip_last", [True, False], ids=["lazy_last_row", "filters"])
def test_bad_rows_give_a_legal_token_beside_healthy_ones(skip_last: bool) -> None:
    """The bad row verifies a draft, and, with the last row left out of the statistics, ends a request."""
    healthy = [4.0, 1.0, 1.0, 1.0]
    for row in BAD_ROWS:
        logits = torch.tensor([healthy, row, healthy, healthy, row])
        batch, _ = small("one_hot", 0)
        drafts = replace(batch.drafts, token_ids=torch.tensor([[0], [0], [-1]]), lengths=torch.tensor([1, 1, 0]))
        sampling = replace(
            select_sampling(batch, 3), temperature=torch.ones(3), any_filter=not skip_last, all_greedy=False
        )
        cu_rows = torch.tensor([0, 2, 4, 5])
        uniforms = Uniforms(torch.full((3, 2), 0.3).double())
        got = with_tile(4)(logits, cu_rows, drafts, sampling, uniforms)
        assert equal(got, verify(logits, cu_rows, drafts, sampling, uniforms))
        assert got.status.tolist() == [STATUS_BAD_ROW, 0, STATUS_BAD_ROW]


def select_sampling(batch: Batch, count: int):
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return replace(batch.sampling, **{name: getattr(batch.sampling, name)[:count] for name in fields})


def test_parameters_shared_by_all_requests_may_be_one_expanded_number() -> None:
    batch, tile = small("reported", 2)
    fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    one = {name: getattr(batch.sampling, name)[:1].expand(batch.num_requests) for name in fields}
    shared = replace(batch, sampling=replace(batch.sampling, **one))
    assert compare(shared, with_tile(tile)).different == []


def test_float64_logits_take_the_torch_backend() -> None:
    batch = random_batch(1, Shape(dtype=torch.float64))
    got = triton_backend.verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, None)
    assert equal(got, batch.verify())


def test_no_draft_and_no_request() -> None:
    batch, tile = small("one_hot", 4)
    busy = [b for b in range(batch.num_requests) if len(batch.rows(b))]
    first = batch.logits[batch.cu_rows[:-1][busy]]
    sampling = replace(select(batch, torch.tensor(busy)).sampling)
    drafts = replace(batch.drafts, token_ids=torch.empty(len(busy), 0, dtype=torch.int64))
    drafts = replace(drafts, lengths=torch.zeros(len(busy), dtype=torch.int64))
    got = with_tile(tile)(first, torch.arange(len(busy) + 1), drafts, sampling)
    assert torch.equal(got.output_ids, sample(first, sampling).output_ids)
    none = replace(drafts, token_ids=torch.empty(0, 2, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
    nobody = select_sampling(batch, 0)
    assert with_tile(tile)(first[:0], torch.zeros(1, dtype=torch.int64), none, nobody).output_ids.shape == (0, 3)
