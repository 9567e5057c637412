"""Calls over nobody's tokens, before any request waits for what they compile on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ...cache.kv_cache import KVCache
from ...model.target import ForwardInput, Target
from ...rejection.types import DraftDistributions, DraftRows, SamplingRows
from ..attention_spec import TreeRows
from ..backend import backend_of
from .block_table import BlockTable
from .paged_view import PagedView
from .workspace import Workspace


def warm_up_target(target: Target, cache: KVCache, table: BlockTable, num_nodes: int = 0) -> None:
    """Compute two tokens, then one, of the row that no request has. Each kind of layer compiles its kernels.

    Layers that keep a state compute them as a new text, and keep nothing. num_nodes: the most of a tree; then also
    with a node.
    """
    for num_tokens, nodes in ((2, 0), (1, 0), *([(2, 1)] if num_nodes else [])):
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=cache.device)
        row, start = torch.full_like(zeros[:1], table.pad_row), zeros[:1]
        bounds = torch.tensor([0, num_tokens]).to(cache.device)
        tree = TreeRows(zeros.new_full((1, num_nodes), -1), zeros[:1] + nodes) if nodes else None
        view = PagedView(cache, table, row, start, bounds, num_tokens, tree=tree)
        target.forward(ForwardInput(zeros, zeros, start, view))
        if tree is not None:
            view.move_paths(zeros.new_full((1, num_nodes + 1), -1))


def warm_up_verification(
    rule: Callable[..., object],
    workspace: Workspace,
    logits: Tensor,
    distributions: Callable[[int], Sequence[DraftDistributions]],
    *,
    trees: bool = False,
) -> None:
    """Call a rule in every way that selects another kernel; its requests have no rows, so nothing is verified.

    rule: `verify` or `verify_block`. workspace: that of later calls. logits [R, V]: of the dtype of later calls, R at
    least 1, never read. distributions: one of each kind that drafts may come with, for so many requests.
    trees: whether drafts may have parents.
    """
    if workspace.max_drafts:
        numbers = torch.zeros(1, dtype=torch.int64, device=logits.device)
        backend_of(logits.device.type).draft_uniforms(numbers, numbers, workspace.max_drafts)
    for num_requests, filters in product({1, workspace.max_requests}, (False, True)):
        sampling = _sampling(num_requests, filters, logits.device)
        for num_drafts in {0, workspace.max_drafts}:
            given = distributions(num_requests) if num_drafts else ()
            for drafts in _drafts(num_requests, num_drafts, given, logits.device, trees=trees):
                rule(logits, drafts.lengths.new_zeros(num_requests + 1), drafts, sampling, None, workspace)


def _sampling(num_requests: int, filters: bool, device: torch.device) -> SamplingRows:
    floats = torch.ones(num_requests, dtype=torch.float32, device=device)
    integers = torch.ones(num_requests, dtype=torch.int64, device=device)
    return SamplingRows(floats, integers, floats, floats, integers, integers, all_greedy=False, any_filter=filters)


def _drafts(
    num_requests: int, num_drafts: int, given: Sequence[DraftDistributions], device: torch.device, *, trees: bool
) -> list[DraftRows]:
    token_ids = torch.zeros(num_requests, num_drafts, dtype=torch.int64, device=device)
    lengths = torch.zeros(num_requests, dtype=torch.int64, device=device)
    every = [DraftRows(token_ids, lengths, distributions) for distributions in (None, *given)]
    return [*every, *(_as_trees(each) for each in every if trees and num_drafts)]


def _as_trees(drafts: DraftRows) -> DraftRows:
    """Turn the drafts into trees. Of all drawn drafts it is said whether siblings were put back."""
    given = drafts.distributions
    if given is not None:
        given = replace(given, replacement=drafts.lengths > 0)
    return replace(drafts, parents=drafts.token_ids - 1, distributions=given)
