"""Verification and plain sampling, by the backend of the logits' device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..kernels.backend import BACKENDS, backend_of
from . import torch_backend
from .tree import verify_chains_together, verify_trees
from .types import DraftDistributions, DraftRows, SamplingRows, Uniforms, Verdict


def verify(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None = None,
    workspace: object | None = None,
    *,
    together: bool = False,
) -> Verdict:
    """Keep some drafts and emit one more token per request, so that the output follows the target's distribution.

    logits [R, V] bfloat16, float16, float32 or float64, last dimension contiguous; cu_rows [B + 1] int64: request b
    owns rows cu_rows[b] to cu_rows[b + 1], which are lengths[b] + 1 rows, or none (it then emits nothing). Row i
    follows the request's first i drafts, the last row all of them. Without uniforms the random numbers are those of
    the request seeds. Inputs are never modified. With a workspace the call allocates nothing on a device that has
    kernels, and the verdict is valid until the next call; the CPU has no use for one. Drafts with parents are trees,
    see `verify_trees`. together: whether requests whose drafts come with their distribution take the block rule.

    Raises ValueError where shapes contradict each other, no backend serves the device, or the workspace is too small.
    """
    _check(logits, cu_rows, drafts, sampling, uniforms)
    kind = logits.device.type
    if kind not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ValueError(f"no rejection sampler for device type {kind!r}; there is one for: {known}")
    form = backend_of(kind).verify or verify_plainly
    return form(logits, cu_rows, drafts, sampling, uniforms, workspace, together=together)


verify_block = partial(verify, together=True)


def verify_plainly(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None,
    workspace: object | None = None,  # unused: for kernels
    *,
    together: bool,
) -> Verdict:
    """The form of a device whose backend has none of its own, in PyTorch. Arguments as of `verify`."""
    if drafts.parents is not None:
        return verify_trees(logits, cu_rows, drafts, sampling, uniforms, together=together)
    chains = verify_chains_together if together else torch_backend.verify
    return chains(logits, cu_rows, drafts, sampling, uniforms)


def plan(
    max_requests: int, max_drafts: int, vocab_size: int, device: torch.device, draft_vocab_size: int = 0
) -> object | None:
    """The memory of every later call, or None on a device without kernels, whose calls allocate what they need.

    draft_vocab_size > 0 if draft distributions may come as logits.
    """
    plan_of = backend_of(device.type).plan_verification
    return None if plan_of is None else plan_of(max_requests, max_drafts, vocab_size, device, draft_vocab_size)


def warmed_up(
    rule: VerificationRule,
    logits: Tensor,
    max_requests: int,
    max_drafts: int,
    draft_vocab_size: int,
    distributions: Callable[[int], Sequence[DraftDistributions]],
    *,
    trees: bool,
) -> VerificationRule:
    """A rule with the memory of every later call, compiled where a device has kernels.

    logits [1, V]: of the dtype and device of later calls, never read. The numbers: see `plan`. distributions: one of
    each kind that drafts may come with, for so many requests. trees: whether drafts may have parents.
    """
    workspace = plan(max_requests, max_drafts, logits.shape[1], logits.device, draft_vocab_size)
    warm_up = backend_of(logits.device.type).warm_up_verification
    if workspace is not None and warm_up is not None and rule in (verify, verify_block):
        warm_up(rule, workspace, logits, distributions, trees=trees)
    return partial(rule, workspace=workspace)


def sample(logits: Tensor, sampling: SamplingRows, uniforms: Uniforms | None = None) -> Verdict:
    """Plain sampling: `verify` without drafts, one row per request.

    logits [B, V]; the token of request b is output_ids[b, 0].
    """
    num_requests = len(logits)
    device = logits.device
    drafts = DraftRows(
        token_ids=torch.empty((num_requests, 0), dtype=torch.int64, device=device),
        lengths=torch.zeros(num_requests, dtype=torch.int64, device=device),
    )
    return verify(logits, torch.arange(num_requests + 1, device=device), drafts, sampling, uniforms)


def _check(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None
) -> None:
    """Metadata only: no value is read, so nothing waits for the device."""
    if logits.dim() != 2 or drafts.token_ids.dim() != 2:
        found = f"{list(logits.shape)} and {list(drafts.token_ids.shape)}"
        raise ValueError(f"expected logits [R, V] and token_ids [B, K], got {found}")
    num_rows, vocab_size = logits.shape
    num_requests, num_positions = drafts.token_ids.shape
    if (vocab_size > 1 and logits.stride(1) != 1) or (num_rows > 1 and logits.stride(0) == 0):
        found = f"strides {logits.stride()}"
        raise ValueError(f"expected contiguous logits rows that share no memory, got {found}; call .contiguous()")
    expected = (
        ("cu_rows", cu_rows, num_requests + 1),
        ("lengths", drafts.lengths, num_requests),
        ("temperature", sampling.temperature, num_requests),
        ("position", sampling.position, num_requests),
    )
    if drafts.parents is not None and drafts.parents.shape != drafts.token_ids.shape:
        raise ValueError(f"expected parents {list(drafts.token_ids.shape)}, got {list(drafts.parents.shape)}")
    for name, tensor, length in expected:
        if tensor.shape != (length,):
            shape = list(tensor.shape)
            raise ValueError(f"expected {name} [{length}] for {num_requests} requests, got {shape}")
    if uniforms is None:
        return
    if uniforms.output.shape != (num_requests, num_positions + 1):
        shape = list(uniforms.output.shape)
        raise ValueError(f"expected output uniforms [{num_requests}, {num_positions + 1}], got {shape}")
    if drafts.distributions is not None and (
        uniforms.accept is None or uniforms.accept.shape != (num_requests, num_positions)
    ):
        raise ValueError(
            f"expected accept uniforms [{num_requests}, {num_positions}] because draft distributions are given"
        )


class VerificationRule(Protocol):
    """Verifies one batch with the random numbers of the request seeds; arguments as of `verify`."""

    def __call__(
        self,
        logits: Tensor,
        cu_rows: Tensor,
        drafts: DraftRows,
        sampling: SamplingRows,
        *,
        workspace: object | None = None,
    ) -> Verdict: ...


LOSSLESS: Mapping[str, VerificationRule] = {"standard": verify, "block": verify_block}
"""The rules under which what is generated follows the target's distribution, by name."""
