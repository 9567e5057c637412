"""Kernels on a GPU against their plain forms on a CPU."""

from __future__ import annotations

import pytest
import torch

from specdec.core.kernels import attention as naive
from specdec.core.kernels.attention import Pages
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.cuda.paged_attention import kernel, varlen
from specdec.core.kernels.cuda.rms_norm import rms_norm
from specdec.core.kernels.layers.norm import WideRMSNorm
from specdec.core.rejection import DraftRows, SamplingRows, verify

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def paged(shapes, heads, dim, dtype, mode="causal", max_keys=4096):
    """Queries, cache and pages on the CPU for requests of (num_queries, num_keys) in shuffled blocks."""
    g = torch.Generator().manual_seed(0)
    width = max(-(-t // BLOCK_SIZE) for _, t in shapes)
    table = torch.randperm(width * len(shapes), generator=g).view(len(shapes), width).int()
    num_tokens, num_slots = sum(n for n, _ in shapes), table.numel() * BLOCK_SIZE
    query = torch.randn(num_tokens, heads[0], dim, generator=g).to(dtype)
    keys, values = (torch.randn(num_slots, heads[1], dim, generator=g).to(dtype) for _ in range(2))
    num_keys = torch.tensor([t for _, t in shapes], dtype=torch.int32)
    cu_queries = torch.tensor([0] + [n for n, _ in shapes]).cumsum(0).int()
    return (
        query,
        keys,
        values,
        Pages(table, num_keys, cu_queries, BLOCK_SIZE, max(n for n, _ in shapes), max_keys, mode),
    )


def on_gpu(record):
    """A dataclass with its tensors there."""
    fields = vars(record).items()
    return type(record)(**{name: each.cuda() if isinstance(each, torch.Tensor) else each for name, each in fields})


def assert_agree(attend, given, spec):
    query, keys, values, pages = given
    expected = naive.attend_pages(query.float(), keys.float(), values.float(), pages, spec)
    found = attend(query.cuda(), keys.cuda(), values.cuda(), on_gpu(pages), on_gpu(spec)).float().cpu()
    torch.testing.assert_close(found, expected, atol=TOLERANCE[query.dtype], rtol=TOLERANCE[query.dtype])


SHAPES = {
    "decode": [(1, 5), (1, 700), (1, 64), (1, 2049)],
    "verify": [(6, 6), (4, 513), (1, 30), (6, 1000)],
    "prompts": [(700, 700), (1, 40), (33, 300)],
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("mode", ["causal", "causal_block", "full_block"])
def test_paged_attention(mode, shapes, dim, dtype):
    given = paged(SHAPES[shapes], (8, 2), dim, dtype, mode)
    assert_agree(kernel.attend_pages, given, AttentionSpec(dim**-0.5))
    assert_agree(kernel.attend_pages, given, AttentionSpec(dim**-0.5, window=50, softcap=20.0))
    assert_agree(kernel.attend_pages, given, AttentionSpec(dim**-0.5, chunk=50, sinks=torch.linspace(-2.0, 2.0, 8)))


def test_a_graph_of_paged_attention_follows_its_inputs():
    *tensors, pages = paged(SHAPES["decode"], (8, 2), 64, torch.float16)
    query, keys, values = (each.cuda() for each in tensors)
    pages = on_gpu(pages)
    spec = AttentionSpec(0.125)
    kernel.attend_pages(query, keys, values, pages, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = kernel.attend_pages(query, keys, values, pages, spec)
    pages.num_keys.sub_(1)
    query.mul_(0.5)
    graph.replay()
    assert torch.equal(output, kernel.attend_pages(query, keys, values, pages, spec))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
def test_paged_attention_of_torch_where_it_has_one(shapes, dtype):
    if not varlen.is_served(torch.device("cuda"), dtype, BLOCK_SIZE, 128):
        pytest.skip("this torch attends by block table only with FlashAttention 3 activated")
    for mode in ("causal", "full_block"):
        assert_agree(varlen.attend_pages, paged(SHAPES[shapes], (8, 2), 128, dtype, mode), AttentionSpec(0.1))
    assert_agree(varlen.attend_pages, paged(SHAPES[shapes], (8, 2), 128, dtype), AttentionSpec(0.1, window=40))


@pytest.mark.parametrize("filters", [False, True], ids=["whole", "filtered"])
@pytest.mark.parametrize("vocab_size", [50, 4096, 151_936])
def test_the_sampler_draws_the_ids_of_a_cpu(vocab_size, filters):
    """Exactly, but where a uniform falls within rounding of a boundary: at most one id in a thousand."""
    g = torch.Generator().manual_seed(vocab_size)
    num_requests, k = 64, 4
    logits = 2 * torch.randn(num_requests * (k + 1), vocab_size, generator=g)
    cu_rows = torch.arange(num_requests + 1) * (k + 1)
    drafts = DraftRows(logits.argmax(1).view(num_requests, k + 1)[:, :k], torch.full((num_requests,), k))
    sampling = SamplingRows(
        temperature=torch.linspace(0, 1.5, num_requests),
        top_k=torch.where(torch.arange(num_requests) % 3 == 0, 20, 0) * filters,
        top_p=torch.full((num_requests,), 0.9 if filters else 1.0),
        min_p=torch.zeros(num_requests),
        seed=torch.arange(num_requests) * 7919,
        position=torch.arange(num_requests) + 5,
        all_greedy=False,
        any_filter=filters,
    )
    here = verify(logits, cu_rows, drafts, sampling)
    there = verify(logits.cuda(), cu_rows.cuda(), on_gpu(drafts), on_gpu(sampling))
    different = here.output_ids != there.output_ids.cpu()
    assert different.float().mean() <= 1e-3
    assert different[sampling.temperature <= 0].sum() == 0


LAST_BITS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # it rounds twice


@pytest.mark.parametrize("dtype", LAST_BITS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 600])
def test_norms(rows, dtype):
    """Of rows, and of heads in a joined product."""
    g = torch.Generator("cuda").manual_seed(rows)
    joined, gain = (torch.randn(shape, generator=g, device="cuda").to(dtype) for shape in ((1, rows, 6144), (4096,)))
    for each in (joined[..., :4096].contiguous(), joined[..., :4096].view(1, rows, 32, 128)):
        own = gain[: each.shape[-1]]
        found, expected = rms_norm(each, own, 1e-5), WideRMSNorm(own, own, 1e-5)(each)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=LAST_BITS[dtype])
