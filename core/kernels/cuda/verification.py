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
from ...rejection.types import DraftDistributions, DraftRows, SamplingRows, Uniforms, Verdict
from ..filters import FilterRows
from .launch import MIN_TILES, PER_BLOCK, PER_ROW, next_power_of_two, splits_of
from .row_filter import filter_rows
from .row_stats import draft_stats, row_stats
from .tree_verdict.kernel import tree_verdict_kernel
from .verdict import DenseProbs, Distributions, Requests, SparseDistribution, Variant
from .verdict.kernel import verdict_kernel
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
    workspace = workspace or _own_workspace(logits, drafts)
    drafts, sampling = _packed_drafts(drafts), _packed(sampling)
    requests = _requests(cu_rows.contiguous(), drafts, sampling, uniforms)
    num_requests, num_drafts = drafts.token_ids.shape
    trees, filters = drafts.parents is not None, sampling.any_filter
    skip_last = not trees and not filters
    rows = workspace.rows(logits, num_requests, num_drafts + 1)
    row_stats(rows, requests.cu_rows, sampling.temperature, workspace.tile, skip_last)
    if filters:
        rows = rows._replace(cutoff=workspace.cutoff)
        by_row = FilterRows(sampling.top_k, sampling.top_p, sampling.min_p)
        filter_rows(rows, requests.cu_rows, sampling.temperature, by_row, workspace.tile)
    distributions = _distributions(drafts, workspace)
    drawn = distributions.kind is not None
    outputs = workspace.outputs(num_requests, num_drafts, trees=trees)
    groups = rows, distributions, workspace.scratch(rows), outputs
    variant = _variant(workspace, rows.num_tiles, distributions)._replace(block=together and drawn)
    if trees:
        options = PER_BLOCK if drawn else PER_ROW
        tree_verdict_kernel[(num_requests,)](*groups, *requests, variant, **options)
    else:
        # One program per request, unless a pass over the vocabulary may be left: for a residual or the last row.
        splits = splits_of(num_requests, rows.num_tiles) if drawn or not filters else 1
        variant = variant._replace(skip_last=skip_last, shared=splits > 1 or not variant.block)
        options = PER_BLOCK if variant.block else PER_ROW
        verdict_kernel[(splits, num_requests)](*groups, *requests, variant, **options)
    return Verdict(outputs.token_ids, outputs.num_accepted, outputs.status, path=outputs.path)


def _own_workspace(logits: Tensor, drafts: DraftRows) -> Workspace:
    given = drafts.distributions
    draft_vocab = 0 if given is None or given.draft_logits is None else given.draft_logits.shape[2]
    num_requests, num_drafts = drafts.token_ids.shape
    return Workspace.plan(num_requests, num_drafts, logits.shape[1], logits.device, draft_vocab)


def _packed_drafts(drafts: DraftRows) -> DraftRows:
    distributions, parents = drafts.distributions, drafts.parents
    if distributions is not None:
        _require_adjacent(distributions.draft_probs)
        _require_adjacent(distributions.draft_logits)
        distributions = _packed(distributions)
    token_ids = drafts.token_ids if drafts.token_ids.stride(1) == 1 else drafts.token_ids.contiguous()
    parents = None if parents is None else parents.contiguous()
    return DraftRows(token_ids, drafts.lengths.contiguous(), distributions, parents)


def _packed(record: _Record) -> _Record:
    tensors = ((name, each) for name, each in vars(record).items() if isinstance(each, Tensor))
    packed: dict[str, Any] = {name: each.contiguous() for name, each in tensors}
    return replace(record, **packed)


def _requests(cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None) -> Requests:
    given = drafts.distributions
    return Requests(
        cu_rows=cu_rows,
        token_ids=drafts.token_ids,
        token_stride=drafts.token_ids.stride(0),
        lengths=drafts.lengths,
        temperature=sampling.temperature,
        seed=sampling.seed,
        position=sampling.position,
        accept=None if uniforms is None or uniforms.accept is None else uniforms.accept.double().contiguous(),
        output=None if uniforms is None else uniforms.output.double().contiguous(),
        num_drafts=drafts.token_ids.shape[1],
        parents=drafts.parents,
        replacement=None if given is None or drafts.parents is None else given.replacement,
    )


def _distributions(drafts: DraftRows, workspace: Workspace) -> Distributions:
    """The given distributions, and the statistics of logits."""
    given = drafts.distributions
    if given is None or not drafts.token_ids.shape[1]:
        return Distributions()
    logits = None if given.draft_logits is None else workspace.draft_logits(given.draft_logits)
    if logits is not None:
        draft_stats(logits, drafts.lengths, given.kind, workspace.tile)
    probs = None if given.draft_probs is None else DenseProbs(given.draft_probs, given.draft_probs.shape[2])
    ids, sparse_probs = given.sparse_ids, given.sparse_probs
    sparse = None if ids is None else SparseDistribution(ids, sparse_probs, ids.shape[2])
    return Distributions(given.kind, probs, logits, sparse, given.t2d)


def _require_adjacent(values: Tensor | None) -> None:
    """Raise ValueError for dense distributions [B, K, Vd] with gaps between their entries, as no engine has them."""
    if values is not None and values.shape[2] > 1 and values.stride(2) != 1:
        raise ValueError(
            f"expected draft distributions with a contiguous last dimension, got strides {values.stride()}"
        )


def _variant(workspace: Workspace, num_tiles: int, distributions: Distributions) -> Variant:
    """Choose the kernel's sizes. There are as few as possible: `warm_up` compiles all that an engine can need."""
    logits, sparse = distributions.logits, distributions.sparse
    return Variant(
        tile=workspace.tile,
        tiles=next_power_of_two(max(MIN_TILES, num_tiles, 0 if logits is None else logits.num_tiles)),
        places=next_power_of_two(max(MIN_PLACES, workspace.max_drafts + 1)),
        sparse=0 if sparse is None else next_power_of_two(sparse.num_ids),
    )
