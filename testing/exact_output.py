"""The exact distribution of what verification makes of a proposer's drafts, on a vocabulary that can be enumerated.

Every draw and every decision is enumerated. The rules are those of the specification, to which tests hold the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.sdk.errors import SpecdecError
from specdec.sdk.extensions import Trees
from specdec.sdk.types import DistributionKind

from .compare import distribution_of
from .drawn_tree import PROMPT, Prefix, Tree, twins
from .rejection.exact_distribution import chain_distribution
from .rejection.reference import Params, target_distribution
from .rejection.tree_reference import Nodes, TreeRule, coupled, left_of, multi_round, outcomes, traversal
from .report import NotApplicable, Violation
from .stage import Stage
from .subject import Subject
from .worlds import FewTokens

MOST_VARIATION = 1e-6  # of a float32 distribution; a distribution in half precision may be off by its rounding
HALF_VARIATION = 1e-2
TARGETS = (Params(), Params(temperature=0.7), Params(temperature=1.3, top_k=2), Params(temperature=0))
NUM_DRAFTS, NUM_NODES = 2, 3  # of a chain, and of a tree: the least in which siblings and a child of one meet


def require_exact_output(subject: Subject) -> None:
    """Raise Violation unless the output distribution equals the target's, for several sampling parameters.

    Raises NotApplicable where drafts cannot be enumerated.
    """
    subject.need_determinism()
    if subject.resolved.model is not None:
        raise NotApplicable("its checkpoint fixes the vocabulary, which is too large for an enumeration")
    stage, num_drafts = _small_stage(subject)
    tree = Tree(stage, num_drafts)
    if not tree.nodes:
        raise NotApplicable("it drafts nothing for the text that this check shows")
    for params in TARGETS:
        target = _target(stage.info.vocab_size, num_drafts + 1, params, subject.seed)
        rules = (multi_round, traversal) if _is_reported(tree) and params.temperature > 0 else (coupled,)
        for rule in rules:
            _require_little(_variation(tree, stage, rule, target), tree, params)


def _small_stage(subject: Subject) -> tuple[Stage, int]:
    """A stage on a few tokens, and the number of drafts there. Raises NotApplicable if the proposer does not run."""
    needs = subject.needs
    most = NUM_DRAFTS if needs.extension(Trees) is None else NUM_NODES
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
    return stage, num_drafts


def _target(vocab_size: int, length: int, params: Params, seed: int) -> list[Tensor]:
    """A target's distribution after every prefix of fewer than `length` tokens: tables [V, ..., V]."""
    generator, tables = torch.Generator().manual_seed(seed), []
    for num_dims in range(1, length + 1):
        logits = 1.5 * torch.randn([vocab_size] * num_dims, generator=generator)
        rows = [target_distribution(row, params) for row in logits.view(-1, vocab_size)]
        tables.append(torch.stack(rows).view(logits.shape))
    return tables


def _variation(tree: Tree, stage: Stage, rule: TreeRule, target: list[Tensor]) -> float:
    """The total variation between the next tokens under a rule and those of the target alone."""
    whole = chain_distribution(target)
    found = torch.zeros_like(whole)
    for drafts, prob in tree.draws():
        nodes = _nodes(tree, stage, drafts, target)
        for place, token, chance in outcomes(rule, nodes):
            output = (*_text(nodes, place), token)
            behind = [table[output] for table in target[len(output) :]]
            found[output] += prob * chance * (chain_distribution(behind) if behind else 1.0)
    return float((found - whole).abs().sum()) / 2


def _nodes(tree: Tree, stage: Stage, drafts: Prefix, target: Sequence[Tensor]) -> Nodes:
    """A draft, and the distributions that verification reads of it."""
    nodes = Nodes(tree.parents(drafts), list(drafts), [], [])
    for place in range(len(drafts) + 1):
        text = _text(nodes, place)
        nodes.p.append(target[len(text)][text])
    nodes.q.extend(_drawn_from(tree, stage, drafts, node) for node in range(len(drafts)))
    return nodes


def _text(nodes: Nodes, place: int) -> Prefix:
    """The tokens on the path to a place."""
    return tuple(nodes.token_ids[above - 1] for above in nodes.path(place)[1:])


def _drawn_from(tree: Tree, stage: Stage, drafts: Prefix, node: int) -> Tensor:
    """What a node was drawn from, as it was reported: one-hot where nothing was."""
    parents, reported = tree.parents(drafts), tree.nodes[drafts[:node]].distribution
    q = distribution_of(reported, 0, parents[node] + 1, stage.needs, stage.info.vocab_size)
    if reported is None or q is None:
        return torch.nn.functional.one_hot(torch.tensor(drafts[node]), stage.info.vocab_size).double()
    siblings = [drafts[other] for other in range(node) if parents[other] == parents[node]]
    return q if reported.replacement else left_of(q, siblings)


def _is_reported(tree: Tree) -> bool:
    """Whether verification reads a distribution at all."""
    reported = tree.nodes[()].distribution
    return reported is not None and int(reported.kind[0]) != DistributionKind.ONE_HOT


def _in_half_precision(tree: Tree) -> bool:
    reported = tree.nodes[()].distribution
    parts = () if reported is None else (reported.probs, reported.logits, reported.sparse_probs)
    return any(part is not None and part.dtype.itemsize == 2 for part in parts)


def _require_little(variation: float, tree: Tree, params: Params) -> None:
    limit = HALF_VARIATION if _in_half_precision(tree) else MOST_VARIATION
    if variation > limit:
        root = [round(value, 4) for value in tree.nodes[()].drawn.tolist()]
        raise Violation(
            expected=f"the target's distribution within {limit:g} (total variation), at {params}",
            found=f"{variation:.3g}; first drafts are drawn from {root}",
            fix="report exactly what each draft was drawn from, and leave no drawn one out",
        )
