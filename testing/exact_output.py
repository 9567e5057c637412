"""The exact distribution of what the engine emits with a proposer's drafts, on a vocabulary that can be enumerated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.core.host import rejection
from specdec.sdk.errors import SpecdecError
from specdec.sdk.extensions import Trees
from specdec.sdk.types import DistributionKind, DraftDistribution

from .compare import distributions_of
from .drawn_tree import PROMPT, Node, Tree, twins
from .exact_trees import tree_variation
from .rejection.exact_distribution import Problem, exact_distribution
from .rejection.reference import Params, target_distribution
from .rejection.tree_reference import coupled, left_of, multi_round, traversal
from .report import NotApplicable, Violation
from .schedules import lockstep
from .small_drafter import Prefix, SmallDrafter
from .subject import Subject
from .worlds import FewTokens

MOST_VARIATION = 1e-6  # of a float32 distribution; a distribution in half precision may be off by its rounding
HALF_VARIATION = 1e-2
TARGETS = (Params(), Params(temperature=0.7), Params(temperature=1.3, top_k=2), Params(temperature=0))
NUM_LIKELY = 4
NUM_DRAFTS, NUM_NODES = 2, 3  # of a chain, and of a tree: the least in which siblings and a child of one meet


def require_exact_output(subject: Subject) -> None:
    """Raise Violation unless the output distribution equals the target's, for several sampling parameters."""
    drafter = _excerpt(subject) if subject.resolved.model is not None else _measured(subject)
    require, fix = _require_exact, "report exactly the distribution that tokens are drawn from"
    if drafter.drafts_trees:
        require, fix = (
            _require_exact_trees,
            "report what each node was drawn from, and leave no drawn node out",
        )
    require(drafter, subject.seed, fix)


def _require_exact(drafter: SmallDrafter, seed: int, fix: str) -> None:
    for params in TARGETS:
        distribution = exact_distribution(rejection.verify, _problem(drafter, params, seed))
        _require_little(distribution.total_variation, drafter, params, fix)


def _require_exact_trees(drafter: SmallDrafter, seed: int, fix: str) -> None:
    for params in TARGETS:
        tables = _distributions(_logits(drafter, seed), params)
        rules = (multi_round, traversal) if drafter.has_distribution and params.temperature > 0 else (coupled,)
        for rule in rules:
            variation = tree_variation(drafter, rule, partial(_after, tables))
            _require_little(variation, drafter, params, fix)


def _after(tables: Sequence[Tensor], prefix: Prefix) -> Tensor:
    """The distribution [V] after a prefix."""
    return tables[len(prefix)][prefix]


def _require_little(variation: float, drafter: SmallDrafter, params: Params, fix: str) -> None:
    limit = HALF_VARIATION if drafter.in_half_precision else MOST_VARIATION
    if variation > limit:
        root = [round(value, 4) for value in drafter.nodes[()].drawn.tolist()]
        raise Violation(
            expected=f"the target's distribution within {limit:g} (total variation), at {params}",
            found=f"{variation:.3g}; first drafts are drawn from {root}",
            fix=fix,
        )


def _measured(subject: Subject) -> SmallDrafter:
    """The proposer on a vocabulary of four tokens. Raises NotApplicable if it does not run there, or drafts nothing."""
    needs = subject.needs
    is_tree = needs.extension(Trees) is not None
    most = NUM_NODES if is_tree else NUM_DRAFTS
    num_drafts = max(needs.min_draft_tokens, min(most, needs.max_draft_tokens or most))
    world = FewTokens()
    try:
        stage = subject.stage(
            k=num_drafts,
            probabilistic=subject.modes[-1],
            world=world,
            max_num_seqs=64,
            max_model_len=32,
        )
        twins(stage, PROMPT)
    except (SpecdecError, Violation) as error:
        reason = str(error).strip().splitlines()[0]
        raise NotApplicable(f"it does not run on a vocabulary of {world.vocab_size}: {reason}") from error
    tree = Tree(stage, num_drafts)
    if not tree.nodes:
        raise NotApplicable("it drafts nothing for the text that this check shows")
    return SmallDrafter(tree.nodes, num_drafts, world.vocab_size, stage.needs)


def _excerpt(subject: Subject) -> SmallDrafter:
    """A made-up drafter of two tokens. Its distributions are five that the proposer reported, cut to the likeliest
    tokens.
    """
    if not subject.reports_distribution:
        raise NotApplicable("its checkpoint fixes the vocabulary, and one-hot drafts are lossless whatever they are")
    stage = subject.stage(probabilistic=True)
    distributions = [distribution for shown in lockstep(stage) for *_, distribution in distributions_of(stage, shown)]
    if len(distributions) <= NUM_LIKELY:
        raise NotApplicable("it reported too few distributions for an excerpt")
    needs = stage.needs.replace(draft_vocabulary=None)
    if needs.stored_form == "sparse":
        needs = needs.replace(sparse_top_m=NUM_LIKELY)
    prefixes = [(), *((token,) for token in range(NUM_LIKELY))]
    every = len(distributions) // len(prefixes)
    cut = [distribution.topk(NUM_LIKELY).values for distribution in distributions[::every]]
    known = {prefix: distribution / distribution.sum() for prefix, distribution in zip(prefixes, cut, strict=False)}
    nodes = (_tree_of if needs.extension(Trees) else _chain_of)(known, needs.stored_form)
    return SmallDrafter(nodes, max(map(len, nodes)) + 1, NUM_LIKELY, needs)


def _chain_of(known: Mapping[Prefix, Tensor], form: str) -> dict[Prefix, Node]:
    """Two tokens, from distributions after none and after each first one."""
    return {prefix: _cut_node(distribution, form, len(prefix), 2) for prefix, distribution in known.items()}


def _tree_of(known: Mapping[Prefix, Tensor], form: str) -> dict[Prefix, Node]:
    """Two siblings, and a child of the first."""
    root = _cut_node(known[()], form, 0, NUM_NODES)
    nodes: dict[Prefix, Node] = {(): replace(root, parent=-1)}
    for first in range(NUM_LIKELY):
        nodes[first,] = replace(root, drawn=left_of(known[()], [first]), parent=-1)
        child = replace(_cut_node(known[first,], form, 1, NUM_NODES), parent=0)
        nodes |= {(first, second): child for second in range(NUM_LIKELY) if second != first}
    return nodes


def _cut_node(distribution: Tensor, form: str, place: int, num_drafts: int) -> Node:
    """A node that draws from `distribution` [V] and reports it at its place, in float32."""
    table = torch.full((1, num_drafts, len(distribution)), 1 / len(distribution))
    table[0, place] = distribution
    reported: dict[str, Any]
    if form == "sparse":
        ids = torch.arange(len(distribution)).expand(1, num_drafts, -1)
        kind, reported = DistributionKind.SPARSE, {"sparse_ids": ids, "sparse_probs": table}
    else:
        kind, reported = DistributionKind.DENSE_PROBS, {"probs": table}
    return Node(distribution, DraftDistribution(kind=torch.tensor([kind], dtype=torch.uint8), **reported), {})


def _logits(drafter: SmallDrafter, seed: int) -> list[Tensor]:
    """A target's after every prefix: K + 1 tables [V, ..., V]."""
    vocab, generator = drafter.vocab_size, torch.Generator().manual_seed(seed)
    return [1.5 * torch.randn([vocab] * (i + 1), generator=generator) for i in range(drafter.num_drafts + 1)]


def _distributions(logits: Sequence[Tensor], params: Params) -> list[Tensor]:
    """What parameters make of them."""
    vocab = logits[0].shape[-1]
    return [
        torch.stack([target_distribution(row, params) for row in table.view(-1, vocab)]).view(table.shape)
        for table in logits
    ]


def _problem(drafter: SmallDrafter, params: Params, seed: int) -> Problem:
    logits = _logits(drafter, seed)
    return Problem(
        target_logits=logits,
        target_distributions=_distributions(logits, params),
        draft_distributions=[drafter.drawn(position) for position in range(drafter.num_drafts)],
        report=drafter.report,
        sampling=_sampling(params),
        coupled=not drafter.has_distribution or params.temperature <= 0,
    )


def _sampling(params: Params) -> rejection.SamplingRows:
    return rejection.SamplingRows(
        temperature=torch.tensor([params.temperature], dtype=torch.float32),
        top_k=torch.tensor([params.top_k]),
        top_p=torch.tensor([params.top_p], dtype=torch.float32),
        min_p=torch.tensor([params.min_p], dtype=torch.float32),
        seed=torch.tensor([7]),
        position=torch.tensor([100]),
        all_greedy=params.temperature <= 0,
        any_filter=params.top_k > 0,
    )
