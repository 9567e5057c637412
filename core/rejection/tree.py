"""Verification of trees: every node a candidate for the token after its parent.

Place 0 is the newest token and place i + 1 is node i. Trees of one-hot drafts and of greedy requests are walked from
the root: the target's token is drawn at a place, and a child that has it is accepted. This rule accepts as many drafts
as any lossless rule can, and the text is that of plain decoding. Trees of drawn drafts are verified in `drawn_tree.py`.

This form walks on the host. `kernels/cuda/verification.py` walks on a device, without a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .drawn_tree import DrawnTrees, Ending, Tree
from .layout import Layout
from .ratio import distribution_tables
from .torch_backend import best_tokens, draw_rows, greedy_requests, no_rows, verify
from .types import (
    NO_PROPOSAL,
    PADDING_TOKEN_ID,
    STATUS_BAD_ROW,
    STATUS_EMPTY_RESIDUAL,
    DraftRows,
    SamplingRows,
    Uniforms,
    Verdict,
)
from .uniforms import draw_tree_uniforms


def verify_trees(
    logits: Tensor,
    cu_rows: Tensor,
    drafts: DraftRows,
    sampling: SamplingRows,
    uniforms: Uniforms | None = None,
    *,
    together: bool,
) -> Verdict:
    """`verify` for drafts with parents, or `verify_block` where `together`. A chain gives what they give for it.

    Row i of a request's logits follows place i. Uniforms are by place (`output`) and by node (`accept`). `num_accepted`
    counts the path. Waits for a device.
    """
    trees = _trees_of(drafts)
    if not len(logits):
        verdict = no_rows(drafts)
        return replace(verdict, path=torch.full_like(verdict.output_ids, PADDING_TOKEN_ID))
    if sampling.all_greedy:
        return _verify_greedy(logits, cu_rows, drafts, trees)
    uniforms = uniforms or draw_tree_uniforms(drafts, sampling, _depths(drafts, trees), together=together)
    layout = Layout.of(len(logits), cu_rows, drafts)
    greedy = greedy_requests(sampling)
    distribution, drawn = draw_rows(logits, cu_rows, sampling, uniforms, greedy)
    tokens = drawn[layout.rows].tolist()  # of p at every place
    bad = [[False] * len(row) for row in tokens] if distribution.bad is None else distribution.bad[layout.rows].tolist()
    endings = [_follow(*each) for each in zip(trees, tokens, bad, strict=True)]
    idle = layout.last.squeeze(1).tolist()
    if drafts.distributions is not None:
        kinds = drafts.distributions.kind.masked_fill(sampling.temperature <= 0, 0).tolist()  # greedy ones read none
        for kind, table in distribution_tables(drafts.distributions, layout.has_draft).items():
            applies = [b for b in range(len(trees)) if kinds[b] == kind and not idle[b] and trees[b].token_ids]
            walked = DrawnTrees(distribution, layout.rows, table, uniforms, drafts, together=together).run(
                [(b, trees[b].without(bad[b])) for b in applies]
            )
            for b, ending in zip(applies, walked, strict=True):
                endings[b] = ending if ending.token >= 0 else replace(ending, token=tokens[b][ending.path[-1]])
    return _verdict(trees, endings, bad, idle, layout)


def verify_chains_together(
    logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None = None
) -> Verdict:
    """Block verification (arXiv 2403.10444): a chain is a tree of one path, which ends where nothing was drawn.

    Drafts without a distribution gain nothing from it: for them one after the other is already optimal.
    """
    if drafts.distributions is None or sampling.all_greedy:
        return verify(logits, cu_rows, drafts, sampling, uniforms)
    num_drawn = (drafts.token_ids != NO_PROPOSAL).cumprod(1).sum(1)
    parents = torch.arange(-1, drafts.token_ids.shape[1] - 1, device=num_drawn.device).expand_as(drafts.token_ids)
    chains = replace(drafts, lengths=drafts.lengths.minimum(num_drawn), parents=parents)
    return replace(verify_trees(logits, cu_rows, chains, sampling, uniforms, together=True), path=None)


def _trees_of(drafts: DraftRows) -> list[Tree]:
    assert drafts.parents is not None, "its caller looked"
    columns = drafts.token_ids.tolist(), drafts.parents.tolist(), drafts.lengths.tolist()
    return [Tree.of(ids[:length], parents) for ids, parents, length in zip(*columns, strict=True)]


def _depths(drafts: DraftRows, trees: Sequence[Tree]) -> Tensor:
    """[B, K + 1] int64, how many nodes lie on the path to each place."""
    width = drafts.token_ids.shape[1] + 1
    padded = [[*tree.depths, *[0] * (width - len(tree.depths))] for tree in trees]
    return torch.tensor(padded, dtype=torch.int64, device=drafts.lengths.device).view(len(trees), width)


def _follow(tree: Tree, tokens: Sequence[int], bad: Sequence[bool]) -> Ending:
    """Down from the root as far as a child has the target's token."""
    path = [0]
    while True:
        place = path[-1]
        child = None if bad[place] else tree.child_with(place, tokens[place])
        if child is None:
            return Ending(path, tokens[place])
        path.append(child + 1)


def _verify_greedy(logits: Tensor, cu_rows: Tensor, drafts: DraftRows, trees: Sequence[Tree]) -> Verdict:
    best, bad = best_tokens(logits)
    bounds, width = cu_rows.tolist(), drafts.token_ids.shape[1] + 1
    rows: list[list[int]] = []
    paths: list[list[int]] = []
    for tree, first, stop in zip(trees, bounds, bounds[1:], strict=False):
        path, output_ids, status = list[int](), list[int](), 0
        if stop > first:
            ending = _follow(tree, best[first:stop], bad[first:stop])
            path, output_ids = ending.path, tree.emitted(ending)
            status = STATUS_BAD_ROW * any(bad[first + place] for place in path)
        rows.append([max(len(path) - 1, 0), status, *_padded(output_ids, width)])
        paths.append(_padded(path, width))
    table = torch.tensor(rows, device=logits.device)
    path_table = torch.tensor(paths, device=logits.device)
    return Verdict(table[:, 2:], table[:, 0], table[:, 1], on_host=rows, path=path_table)


def _padded(values: Sequence[int], width: int) -> list[int]:
    return [*values, *[PADDING_TOKEN_ID] * (width - len(values))]


def _verdict(
    trees: Sequence[Tree],
    endings: Sequence[Ending],
    bad: Sequence[Sequence[bool]],
    idle: Sequence[int],
    layout: Layout,
) -> Verdict:
    width, device = layout.rows.shape[1], layout.rows.device
    output_ids, paths, status = [], [], []
    for tree, ending, spoilt, is_idle in zip(trees, endings, bad, idle, strict=True):
        output_ids.append(_padded([] if is_idle else tree.emitted(ending), width))
        paths.append(_padded([] if is_idle else ending.path, width))
        bits = STATUS_BAD_ROW * any(spoilt[place] for place in ending.path) | STATUS_EMPTY_RESIDUAL * ending.empty
        status.append(0 if is_idle else bits)
    path = torch.tensor(paths, device=device)
    return Verdict(
        output_ids=torch.tensor(output_ids, device=device),
        num_accepted=((path >= 0).sum(1) - 1).clamp_(min=0),
        status=torch.tensor(status, device=device),
        path=path,
    )
