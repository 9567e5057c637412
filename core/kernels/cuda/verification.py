"""Verification by Triton kernels, without a copy of the logits and without host reads.

Statistics of the rows; statistics of draft logits, if distributions come as such; cutoffs, if a request filters; the
verdict.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...rejection.sampler import verify_plainly
from ...rejection.types import DistributionKind, DraftDistributions, DraftRows, SamplingRows, Uniforms, Verdict
from ..filters import FilterRows
from .launch import MIN_TILES, next_power_of_two, splits_of
from .row_filter import filter_rows
from .row_stats import TileStats, draft_stats, row_stats
from .tree_verdict import Trees
from .tree_verdict.kernel import tree_verdict
from .verdict import DenseDistribution, Distributions, Requests, Rows, SparseDistribution, Variant
from .verdict.kernel import verdict
from .workspace import Workspace

MIN_PLACES = 16  # as with MIN_TILES, for drafts of up to 15
_Record = TypeVar("_Record", DraftDistributions, SamplingRows)


def verify(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None,
    workspace: Workspace | None = None,
    *,
    together: bool = False,
) -> Verdict:
    """Verify as `rejection.sampler.verify_plainly` does, to which float64 logits are left: no kernel takes them."""
    if logits.dtype == torch.float64 or not len(drafts.lengths):
        return verify_plainly(logits, cu_rows, drafts, sampling, uniforms, together=together)
    parents, filters = drafts.parents, sampling.any_filter
    workspace = workspace or _own_workspace(logits, drafts)
    cu_rows, drafts, sampling = cu_rows.contiguous(), _packed_drafts(drafts), _packed(sampling)
    given = drafts.distributions
    num_requests, num_drafts = drafts.token_ids.shape
    skip_last = parents is None and not filters
    stats = _statistics(logits, cu_rows, sampling, num_drafts, workspace, skip_last=skip_last)
    distributions = _distributions(drafts, workspace)
    variant = _variant(stats, workspace.max_drafts + 1, given, distributions, filters, uniforms is not None)
    rows, requests = _rows(logits, cu_rows, stats, workspace), _requests(drafts, sampling, uniforms)
    scratch = workspace.scratch(num_requests, num_drafts + 1, logits.shape[1])
    outputs = workspace.outputs(num_requests, num_drafts)
    if parents is None:
        splits, together = _splits(stats, variant.drawn, filters), together and given is not None
        variant = variant._replace(skip_last=skip_last, block=together, shared=splits > 1 or not together)
        verdict(rows, requests, distributions, scratch, outputs, variant, splits)
        return Verdict(*outputs)
    parents, path = parents.contiguous(), workspace.paths(num_requests, num_drafts)
    replacement = None if given is None else given.replacement
    trees = Trees(parents, parents if replacement is None else replacement, path)
    variant, put_back = variant._replace(block=together), replacement is not None
    tree_verdict(rows, requests, trees, distributions, scratch, outputs, variant, put_back=put_back)
    return Verdict(*outputs, path=path)


def _own_workspace(logits: Tensor, drafts: DraftRows) -> Workspace:
    given = drafts.distributions
    draft_vocab = 0 if given is None or given.draft_logits is None else given.draft_logits.shape[2]
    num_requests, num_drafts = drafts.token_ids.shape
    return Workspace.plan(num_requests, num_drafts, logits.shape[1], logits.device, draft_vocab)


def _statistics(
    logits: Tensor, cu_rows: Tensor, sampling: SamplingRows, num_drafts: int, workspace: Workspace, *, skip_last: bool
) -> TileStats:
    """Compute the statistics of all rows, and their cutoffs if a request filters."""
    stats = workspace.stats(len(cu_rows) - 1, num_drafts + 1, logits.shape[1])
    row_stats(logits, cu_rows, sampling.temperature, stats, skip_last=skip_last)
    if sampling.any_filter:
        filters = FilterRows(sampling.top_k, sampling.top_p, sampling.min_p)
        filter_rows(logits, cu_rows, sampling.temperature, filters, stats, workspace.cutoff)
    return stats


def _packed_drafts(drafts: DraftRows) -> DraftRows:
    distributions = drafts.distributions
    if distributions is not None:
        _require_adjacent(distributions.draft_probs)
        _require_adjacent(distributions.draft_logits)
        distributions = _packed(distributions)
    token_ids = drafts.token_ids if drafts.token_ids.stride(1) == 1 else drafts.token_ids.contiguous()
    return DraftRows(token_ids, drafts.lengths.contiguous(), distributions)


def _packed(record: _Record) -> _Record:
    tensors = ((name, each) for name, each in vars(record).items() if isinstance(each, Tensor))
    packed: dict[str, Any] = {name: each.contiguous() for name, each in tensors}
    return replace(record, **packed)


def _rows(logits: Tensor, cu_rows: Tensor, stats: TileStats, workspace: Workspace) -> Rows:
    return Rows(
        logits=logits,
        stride=logits.stride(0),
        cu_rows=cu_rows,
        maxima=stats.maxima,
        sums=stats.sums,
        cutoff=workspace.cutoff,
        vocab_size=logits.shape[1],
        num_places=0,
        num_tiles=stats.maxima.shape[2],
    )


def _requests(drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None) -> Requests:
    output = sampling.seed if uniforms is None else uniforms.output.double().contiguous()
    accept = output if uniforms is None or uniforms.accept is None else uniforms.accept.double().contiguous()
    return Requests(
        token_ids=drafts.token_ids,
        token_stride=drafts.token_ids.stride(0),
        lengths=drafts.lengths,
        temperature=sampling.temperature,
        seed=sampling.seed,
        position=sampling.position,
        accept=accept,
        output=output,
        num_drafts=drafts.token_ids.shape[1],
    )


def _distributions(drafts: DraftRows, workspace: Workspace) -> Distributions:
    """The given distributions. In place of a missing one stands a tensor that the kernel's variant never reads."""
    distributions, any_tensor = drafts.distributions, workspace.counter
    nothing = DenseDistribution(any_tensor, 0, 0, 0, workspace.draft_maxima, workspace.draft_sums, 0, 0)
    no_ids = SparseDistribution(any_tensor, any_tensor, 0, 0)
    if distributions is None or not drafts.token_ids.shape[1]:
        return Distributions(any_tensor, nothing, nothing, no_ids, any_tensor)
    logits = nothing
    if distributions.draft_logits is not None:
        stats = workspace.draft_stats(*distributions.draft_logits.shape)
        draft_stats(
            distributions.draft_logits, drafts.lengths, distributions.kind, DistributionKind.DENSE_LOGITS, stats
        )
        logits = _dense(distributions.draft_logits, stats)
    sparse = no_ids
    if distributions.sparse_ids is not None and distributions.sparse_probs is not None:
        sparse = SparseDistribution(
            distributions.sparse_ids, distributions.sparse_probs, distributions.sparse_ids.shape[2], 0
        )
    probs = (
        nothing
        if distributions.draft_probs is None
        else _dense(distributions.draft_probs, TileStats(nothing.maxima, nothing.sums, 0))
    )
    return Distributions(
        distributions.kind,
        probs,
        logits,
        sparse,
        any_tensor if distributions.t2d is None else distributions.t2d,
    )


def _dense(values: Tensor, stats: TileStats) -> DenseDistribution:
    size = values.shape[2]
    return DenseDistribution(values, 0, size, size, stats.maxima, stats.sums, stats.maxima.shape[-1], 0)


def _require_adjacent(values: Tensor | None) -> None:
    """Raise ValueError for dense distributions [B, K, Vd] with gaps between their entries, as no engine has them."""
    if values is not None and values.shape[2] > 1 and values.stride(2) != 1:
        raise ValueError(
            f"expected draft distributions with a contiguous last dimension, got strides {values.stride()}"
        )


def _splits(stats: TileStats, drawn: bool, filters: bool) -> int:
    """Programs per request: one, unless a pass over the vocabulary may be left, for a residual or the last row."""
    num_requests, _, num_tiles = stats.maxima.shape
    return splits_of(num_requests, num_tiles) if drawn or not filters else 1


def _variant(
    stats: TileStats,
    most_places: int,
    given: DraftDistributions | None,
    distributions: Distributions,
    filters: bool,
    uniforms: bool,
) -> Variant:
    """Choose the kernel's variant. There are as few as possible: `warm_up` compiles all that an engine can need."""
    num_tiles, num_ids = stats.maxima.shape[2], distributions.sparse.num_ids
    probs, logits = distributions.probs.size > 0, distributions.logits.size > 0
    return Variant(
        tile=stats.tile,
        tiles=next_power_of_two(max(MIN_TILES, num_tiles, distributions.logits.num_tiles)),
        places=next_power_of_two(max(MIN_PLACES, most_places)),
        drawn=probs or logits or num_ids > 0,
        probs=probs,
        logits=logits,
        sparse=next_power_of_two(num_ids) if num_ids else 0,
        mapped=given is not None and given.t2d is not None,
        filters=filters,
        uniforms=uniforms,
    )
