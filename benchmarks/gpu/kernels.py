"""Kernels alone: attention against the bandwidth of the memory, and the sampler."""

from __future__ import annotations

import torch
from benchmarks.rejection import Shape, case_of, ours

from specdec.core.kernels.attention import Pages
from specdec.core.kernels.attention_spec import AttentionSpec
from specdec.core.kernels.backend import backend_of

from . import figures
from .run import Run

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 32, 8, 128, 16
LENGTHS = (1024, 8192, 32768, 131072)


def attention(run: Run) -> None:
    """One query a request over long caches, in the shapes of an 8B model's layer."""
    bandwidth = run.bandwidth()
    for batch in (1, 16):
        for length in (64, 256) if run.smoke else LENGTHS:
            if batch * length > 2**20:
                continue
            seconds = _attention_seconds(run, batch, length)
            num_bytes = 2 * batch * length * KV_HEADS * DIM * run.dtype.itemsize
            run.figures.put(f"attention, batch {batch}, {length} keys, us", 1e6 * seconds)
            share = num_bytes / seconds / bandwidth
            run.figures.put(f"attention, batch {batch}, {length} keys: share of the bandwidth", share)
    if not run.smoke:
        _norms(run)


def _attention_seconds(run: Run, batch: int, length: int) -> float:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=run.device, dtype=run.dtype)

    num_blocks = batch * length // BLOCK_SIZE
    table = torch.randperm(num_blocks, device=run.device).view(batch, -1).int()
    num_keys = torch.full((batch,), length, dtype=torch.int32, device=run.device)
    bounds = torch.arange(batch + 1, dtype=torch.int32, device=run.device)
    pages = Pages(table, num_keys, bounds, BLOCK_SIZE, 1, length)
    keys, values = (normal(num_blocks * BLOCK_SIZE, KV_HEADS, DIM) for _ in range(2))
    query, attend = normal(batch, HEADS, DIM), backend_of(run.device.type).attend_pages
    return run.device_seconds(lambda: attend(query, keys, values, pages, AttentionSpec(DIM**-0.5)))


def _norms(run: Run) -> None:
    """At batch 1 and as large as a prompt."""
    from specdec.core.kernels.cuda.rms_norm import rms_norm  # needs triton

    for rows in (1, 64, 2048):
        stream = torch.randn(rows, 4096, device=run.device, dtype=run.dtype)
        norm = run.device_seconds(lambda s=stream: rms_norm(s, s[0], 1e-5))
        run.figures.put(f"norm of {rows} x 4096, us", 1e6 * norm)


def sampler(run: Run) -> None:
    """Verification of one-hot drafts, in the shape of its goal and smaller ones."""
    dtype = "fp32" if run.smoke else "bf16"
    shapes = {"sampler, 1 x 5 x 152k": Shape(1, 5, "152k", "one_hot", False, dtype)}
    if run.smoke:
        shapes[figures.SAMPLER] = Shape(2, 2, "32k", "one_hot", False, dtype)
    else:
        shapes[figures.SAMPLER] = Shape(256, 5, "152k", "one_hot", False, dtype)
        shapes["sampler, 256 x 5 x 152k bf16, filters"] = Shape(256, 5, "152k", "one_hot", True, dtype)
        shapes["sampler, 256 x 5 x 152k bf16, sparse distribution"] = Shape(256, 5, "152k", "sparse", False, dtype)
    for name, shape in shapes.items():
        call = ours(case_of(shape, run.device))
        run.figures.put(name, 1e6 * run.device_seconds(call, times=2 if run.smoke else 20))
