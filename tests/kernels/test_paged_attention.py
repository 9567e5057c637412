"""Paged attention: the Triton kernel, interpreted, gives what the plain form gives, and that what spans give.

Interpreted kernels take milliseconds per program, so shapes are small; tiles are those of a real launch. The
interpreter multiplies bfloat16 as if its bits were integers: that dtype is in `tests/gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import signature

import pytest
import torch
import triton
import triton.language as tl
from paged_inputs import BLOCK_SIZE, DEVICE, HEADS, Inputs, inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from specdec.core.kernels import attention as naive
from specdec.core.kernels.attention import Span, attend_by_span
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cuda.paged_attention import LibraryOr, kernel, varlen

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of 0 / 0 in rows that pad a tile
MODES = ("causal", "causal_block", "full_block")


@triton.jit
def seen_kernel(found_ptr, begin, stop, KEYS: tl.constexpr, SEGMENT: tl.constexpr, PARTS: tl.constexpr):
    """Counts how often parts take each key."""
    segment, at, tiles = kernel.tiles_of_part(tl.program_id(0), begin, stop, KEYS, SEGMENT, PARTS)
    for tile in range(at, tiles):
        places = found_ptr + kernel.keys_of(tile, segment, KEYS, SEGMENT, PARTS)
        tl.store(places, tl.load(places) + 1)


def assert_agree(given: Inputs, spec: AttentionSpec, tolerance: float = 2e-6) -> None:
    found, expected = kernel.attend_pages(*given, spec), naive.attend_pages(*given, spec)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


RAGGED = [(1, 9), (3, 3), (0, 0), (2, 7)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 3], ids=["all", "window"])
def test_kernel_on_a_ragged_batch(mode, window):
    assert_agree(inputs(RAGGED, mode=mode), AttentionSpec(0.3, window, 5.0 if window else None))


def sinks_of(given: Inputs) -> Tensor:
    return torch.linspace(-3.0, 3.0, given[0].shape[1], device=DEVICE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [None, 4], ids=["all", "chunk"])
def test_kernel_with_sinks_and_chunks(mode, chunk):
    given = inputs(RAGGED, mode=mode)
    assert_agree(given, AttentionSpec(0.3, chunk=chunk, sinks=sinks_of(given)))


@pytest.mark.slow
def test_parts_of_keys_join_with_a_sink_and_within_a_chunk():
    given = inputs([(1, 300), (2, 530)], heads="mqa", max_keys=768, block_size=16)
    assert_agree(given, AttentionSpec(0.3, sinks=sinks_of(given)))
    assert_agree(given, AttentionSpec(0.3, chunk=529, sinks=sinks_of(given)))


def test_the_plain_form_scales_by_the_sigmoid_of_the_log_sum_exp_over_the_sink():
    given = inputs([(1, 9), (3, 7)], heads="mha")
    sinks = sinks_of(given)
    found = naive.attend_pages(*given, AttentionSpec(0.3, sinks=sinks))
    without = naive.attend_pages(*given, AttentionSpec(0.3))
    query, keys, _, pages = given
    position = torch.arange(9, device=DEVICE)
    slots = pages.block_table[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    scores = torch.einsum("hd,thd->ht", query[0], keys[slots]) * 0.3
    share = torch.sigmoid(scores.logsumexp(-1) - sinks)
    torch.testing.assert_close(found[0], without[0] * share[:, None])


@pytest.mark.slow
def test_parts_of_keys_join_to_the_whole(monkeypatch):
    """A request that ends in the second of three segments, one that needs all, and one with a window in the last."""
    given = inputs([(1, 300), (2, 530)], heads="mqa", max_keys=600, block_size=16)
    assert kernel.most_divided_of(given[3]) == 2
    for parts in (2, kernel.PARTS):  # a part with two segments, and parts without any
        monkeypatch.setattr(kernel, "PARTS", parts)
        assert_agree(given, AttentionSpec(0.3))
        assert_agree(given, AttentionSpec(0.3, window=10))
        assert_agree(given, AttentionSpec(0.3, window=300))


def test_what_empty_parts_leave_behind_is_not_read(monkeypatch):
    """One part of all has keys, and memory is full of NaN where nothing was written."""
    given = inputs([(1, 100), (2, 130)], heads="mqa", max_keys=8192, block_size=16)
    new_empty = torch.Tensor.new_empty

    def poisoned(like, *shape, **kind):
        made = new_empty(like, *shape, **kind)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert_agree(given, AttentionSpec(0.3))


@pytest.mark.parametrize(("begin", "stop"), [(0, 1), (0, 256), (0, 257), (300, 301), (250, 9000), (8191, 20000)])
@pytest.mark.parametrize("parts", [1, 32])
def test_every_tile_of_keys_is_in_one_part_and_none_besides(parts, begin, stop):
    found = torch.zeros(2**15, dtype=torch.int32, device=DEVICE)
    seen_kernel[(parts,)](found, begin, stop, 16, kernel.SEGMENT, parts)
    expected = torch.zeros_like(found)
    expected[begin // 16 * 16 : -(-stop // 16) * 16] = 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("length", [8192, 100_000])
def test_the_keys_of_one_long_text_are_shared_evenly_by_enough_programs(length):
    """At batch 1, a model with 8 key heads on 132 processors: 256 programs, none a segment longer than another."""
    programs = kernel.num_programs(kernel.PARTS, 8)
    assert 8 * programs == 256
    segments = -(-length // kernel.SEGMENT)
    assert -(-segments // programs) * programs <= segments + programs


def test_programs_of_a_full_batch_do_not_idle_over_a_thousand_keys():
    """Whatever a text may become: 64 requests of 4 segments each, with 8 key heads."""
    assert kernel.num_programs(kernel.PARTS, 64 * 8) == 4


def test_a_batch_may_have_more_key_heads_than_a_grid_has_programs_on_its_second_axis(monkeypatch):
    grids = []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernel, "attend_pages_kernel", Launched())
    query, keys, values, pages = inputs([(1, 9)])
    table, num_keys = pages.block_table.expand(40_000, -1), pages.num_keys.expand(40_000)
    many = replace(pages, block_table=table, num_keys=num_keys, cu_queries=num_keys.new_zeros(40_001))
    kernel.attend_pages(query, keys, values, many, AttentionSpec(0.3))
    assert [(grid[0] >= 40_000 * keys.shape[1], max(grid[1:], default=1) <= 65_535) for grid in grids] == [(True, True)]


@pytest.mark.parametrize("num_requests", [1, 8, 64, 512, 4096])
def test_what_parts_leave_behind_stays_small(num_requests):
    *_, pages = inputs([(1, 9)])
    pages = replace(pages, num_keys=pages.num_keys.expand(num_requests), max_queries=700, max_keys=2**20)
    most = kernel.most_divided_of(pages)
    assert num_requests * most * kernel.PARTS * 32 * 128 * 4 <= 2**28, "32 heads of 128 in fp32: 256 MiB"
    assert most >= 8 or num_requests > 64, "drafts of seven tokens of 64 requests"


@pytest.mark.slow
def test_a_prompt_longer_than_a_tile_and_a_program_that_goes_on_to_the_next(monkeypatch):
    *tensors, pages = inputs([(1, 20), (1, 1), (20, 27)], heads="mqa")
    assert_agree((*tensors, pages), AttentionSpec(0.2))
    monkeypatch.setattr(kernel, "ENOUGH_PROGRAMS", 1)
    divided = replace(pages, max_keys=512)
    assert_agree((*tensors, divided), AttentionSpec(0.2))  # tiles follow the average: the prompt's program has several
    monkeypatch.setattr(kernel, "FEW_QUERIES", 3)
    assert_agree((*tensors, divided), AttentionSpec(0.2))  # the prompt whole, and its neighbours in parts


def test_a_prompt_beside_it_changes_no_bit_of_a_request(monkeypatch):
    monkeypatch.setattr(kernel, "FEW_QUERIES", 8)
    spec, shapes = AttentionSpec(0.3), [(1, 300), (40, 40)]
    query, keys, values, pages = inputs(shapes, heads="mqa", max_keys=512, block_size=16)
    alone = replace(
        pages,
        block_table=pages.block_table[:1],
        num_keys=pages.num_keys[:1],
        cu_queries=pages.cu_queries[:2],
        max_queries=1,
    )
    assert kernel.most_divided_of(pages) == 4, "the prompt is whole"
    found = kernel.attend_pages(query, keys, values, pages, spec)[:1]
    assert torch.equal(found, kernel.attend_pages(query[:1], keys, values, alone, spec))


def test_kernel_in_half_precision_and_odd_head_sizes():
    assert_agree(inputs([(2, 6), (1, 5)], dims=(40, 24), dtype=torch.float16), AttentionSpec(0.2), tolerance=2e-3)


def test_neighbours_change_no_bit():
    alone, spec = inputs([(2, 300)], heads="mqa", max_keys=1024, block_size=16), AttentionSpec(0.3)
    query, keys, values, pages = alone
    both = replace(
        pages,
        block_table=pages.block_table.repeat(2, 1),
        num_keys=torch.tensor([300, 40], dtype=torch.int32, device=DEVICE),
        cu_queries=torch.tensor([0, 2, 4], dtype=torch.int32, device=DEVICE),
    )
    found = kernel.attend_pages(query.repeat(2, 1, 1), keys, values, both, spec)[:2]
    assert torch.equal(found, kernel.attend_pages(*alone, spec))


def test_queries_of_nobody_change_nothing():
    query, keys, values, pages = inputs([(1, 5), (2, 6)])
    padded = torch.cat([query, torch.full_like(query, torch.nan)])
    for attend in (kernel.attend_pages, naive.attend_pages):
        found = attend(padded, keys, values, pages, AttentionSpec(0.3))[: len(query)]
        assert torch.equal(found, attend(query, keys, values, pages, AttentionSpec(0.3)))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [None, 1, 4, 100], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_plain_form_gives_what_attention_by_spans_gives(mode, window, softcap, heads):
    assert_spans_agree(mode, heads, lambda num_heads: AttentionSpec(0.3, window, softcap))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chunk", [None, 1, 5, 100], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_plain_form_gives_what_attention_by_spans_gives_with_sinks_and_chunks(mode, chunk, heads):
    assert_spans_agree(mode, heads, lambda num_heads: AttentionSpec(0.3, chunk=chunk, sinks=torch.randn(num_heads)))


def assert_spans_agree(mode, heads, spec_of):
    """Which is compared with attention written out in fp64: one distribution on every device."""
    shapes = [(1, 9), (7, 7), (1, 1), (4, 11), (3, 33)]
    query, keys, values, pages = (
        each.cpu() if isinstance(each, Tensor) else each for each in inputs(shapes, heads=heads, mode=mode)
    )
    spec, spans, start = spec_of(query.shape[1]), [], 0
    for row, (num_queries, num_keys) in zip(pages.block_table.cpu(), shapes, strict=True):
        position = torch.arange(num_keys)
        slots = row[position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
        spans.append(Span(start, num_queries, num_keys, slots, torch.device("cpu"), mode))
        start += num_queries
    found = naive.attend_pages(query, keys, values, pages, spec)
    torch.testing.assert_close(found, attend_by_span(query, keys, values, spans, spec), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif("block_table" not in signature(varlen_attn).parameters, reason="this torch takes no block table")
@pytest.mark.parametrize("window", [None, 9], ids=["all", "window"])
def test_torchs_own_form_is_called_as_the_installed_torch_wants_it(window):
    """By shapes only: what computes it needs a GPU."""
    query, keys, values, pages = inputs([(2, 6), (1, 5)], dims=(64, 64), dtype=torch.bfloat16, block_size=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = varlen.attend_pages(query, keys, values, pages, AttentionSpec(0.3, window))
    assert (found.shape, found.dtype) == (query.shape, query.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_torchs_own_form_is_not_chosen_where_a_trial_fails(dtype):
    assert not varlen.is_served(torch.device("cpu"), dtype, 16, 64)


@pytest.mark.parametrize(("dim", "whose"), [(256, "the library's"), (512, "ours")])
def test_torchs_own_form_serves_heads_of_a_size_that_a_trial_takes(dim, whose, monkeypatch):
    """FlashAttention 3 takes at most 256; a model may have layers of 256 and of 512."""

    def attend(query, *others):
        if query.shape[2] > 256:
            raise RuntimeError("heads of at most 256")
        return query

    monkeypatch.setattr(varlen, "varlen_attn", lambda block_table, seqused_k, window_size: None)
    monkeypatch.setattr(varlen, "is_served", varlen.is_served.__wrapped__)
    monkeypatch.setattr(varlen, "attend_pages", attend)
    *tensors, pages = inputs([(1, 5)], dims=(dim, dim), dtype=torch.bfloat16)
    found = LibraryOr("ours", lambda query, *others: None)(*tensors, pages, AttentionSpec(0.3))
    assert whose == ("ours" if found is None else "the library's")


@pytest.mark.full
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("window", [None, 1, 70], ids=str)
def test_kernel_over_heads_sizes_modes_and_windows(window, mode, dim, heads):
    given = inputs([(1, 90), (6, 71), (0, 0), (1, 1), (17, 40)], heads=heads, dims=(dim, dim), mode=mode)
    assert_agree(given, AttentionSpec(dim**-0.5, window), tolerance=5e-6)
    assert_agree(given, AttentionSpec(dim**-0.5, window, 8.0), tolerance=5e-6)


@pytest.mark.full
@pytest.mark.parametrize("num_queries", range(1, 9))
@pytest.mark.parametrize("num_keys", [8, 63, 64, 65, 255, 256, 257])
def test_kernel_at_the_edges_of_tiles_and_parts(num_keys, num_queries):
    given = inputs([(num_queries, num_keys)], heads="mha", max_keys=512, block_size=16)
    assert_agree(given, AttentionSpec(0.3))
