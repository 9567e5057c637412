"""The Token Recycling proposer: chains of successors, or trees of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec.sdk import Draft, KeptTokens, Needs, ProposerConfig, RequestView, Services, StepView, TargetInfo
from specdec.sdk.extensions import RejectedTokens, State, TargetTokens, Trees
from specdec.sdk.json_files import load_lines, save_lines
from specdec.sdk.trees import Tree, best_first

Successors = dict[int, Sequence[int]]
"""The likeliest next tokens after each token, as the target computed them last."""

RANK_RATES = (0.43, 0.075, 0.038, 0.018, 0.014, 0.008, 0.005, 0.004)
"""How often the successor of each rank is right where its predecessor was: of the packaged target's greedy texts."""

MOST_NAMESPACES = 64
"""Whose successors are kept: the last ones used."""

FILE_NAME, FORMAT = "successors.jsonl", 1


class TokenRecyclingProposer:
    """Drafts the tokens that the target last found likeliest after the newest one, then those after each of them.

    The method is Token Recycling (arXiv 2408.08696). A chain follows the likeliest successor only. With
    `max_nodes` eight successors of each token are kept, as in the paper, and drafts are trees. Their shape is the
    best one for the measured rates of the ranks; a branch ends early where a token has fewer successors.

    The target computes logits after every draft that it verifies, and those after rejected drafts are learned too. A
    prompt has logits in its last row only. After its other tokens the token that follows in the prompt is learned
    instead: it goes before the successors that are known.

    Successors are shared by the requests of a namespace, as in the paper. `save` and `load` carry them to another run.
    """

    default_draft_tokens = 3
    """A chain of single successors is seldom right for longer."""

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The target's likeliest token after every row, or its eight likeliest for trees."""
        draws_trees = config.max_nodes is not None
        count = min(len(RANK_RATES), target.vocab_size) if draws_trees else 1
        trees = (Trees(),) if draws_trees else ()
        return Needs(state="shared", extensions=(TargetTokens(top_k=count, rejected=True), State(), *trees))

    def __init__(self, config: ProposerConfig) -> None:
        self._depth, self._draws_trees = config.num_draft_tokens, config.max_nodes is not None
        self._successors: dict[str, Successors] = {}  # by namespace, the last one used comes last
        self._namespaces: dict[str, str] = {}  # by request

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Saved successors belong to a vocabulary."""
        self._vocab_size = target.vocab_size

    def save(self, path: Path) -> None:
        """Write the successors of every namespace below `path`."""
        save_successors(path, self._successors, self._vocab_size)

    def load(self, path: Path) -> None:
        """Take the successors that `save` wrote. Raises ConfigError SD-E180 if they are of another vocabulary."""
        self._successors = {**load_successors(path, self._vocab_size)}

    def on_start(self, request: RequestView) -> None:
        """Use the successors of its namespace, and forget those used longest ago."""
        self._namespaces[request.request_id] = request.namespace
        self._successors[request.namespace] = self._successors.pop(request.namespace, {})
        while len(self._successors) > MOST_NAMESPACES:
            del self._successors[next(iter(self._successors))]

    def observe(self, step: StepView) -> None:
        """Learn what the target computed: after rejected drafts first, so that the text itself has the last word."""
        assert step.rejected is not None, "declared in needs"
        rejected, kept = list(_of_rejected(step.rejected)), list(_of_kept(step.kept))
        for request_id, b in sorted(zip(step.request_ids, range(len(step)), strict=True)):
            known = self._of(request_id)
            for token, found, following in (*rejected[b], *kept[b]):
                known[token] = found if found[0] >= 0 else _before(following, known.get(token, ()), len(found))

    def propose(self, step: StepView) -> Draft:
        """A chain of successors for each request, as long as its budget or until a token has none; or a tree."""
        wanted = zip(step.request_ids, step.newest_token.tolist(), step.budget.tolist(), strict=True)
        if self._draws_trees:
            trees = [_tree(self._of(name), token, budget, self._depth) for name, token, budget in wanted]
            return Draft.from_trees(trees, step.width)
        drafts = [list(_chain(self._of(name), token, budget)) for name, token, budget in wanted]
        return Draft.from_lists(drafts, step.width)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request; what was learned of it stays."""
        del self._namespaces[request.request_id]

    def _of(self, request_id: str) -> Successors:
        return self._successors.setdefault(self._namespaces[request_id], {})


def _chain(successors: Mapping[int, Sequence[int]], token: int, length: int) -> Iterator[int]:
    for _ in range(length):
        following = successors.get(token)
        if following is None:
            return
        token = following[0]
        yield token


def _tree(successors: Mapping[int, Sequence[int]], token: int, num_nodes: int, depth: int) -> Tree:
    def children(token: int) -> Iterator[tuple[int, float, int]]:
        pairs = zip(successors.get(token, ()), RANK_RATES, strict=False)
        return ((following, rate, following) for following, rate in pairs)

    tree, _ = best_first(children, token, num_nodes, depth)
    return tree


def _before(token: int, known: Sequence[int], count: int) -> Sequence[int]:
    """A token, then others that are known: `count` at most."""
    return [token, *(each for each in known if each != token)][:count]


Lesson = tuple[int, Sequence[int], int]
"""A token, what the target found likeliest after it, -1 where that was not computed, and what followed."""


def _of_kept(kept: KeptTokens) -> Iterator[list[Lesson]]:
    """What each request's kept tokens teach."""
    assert kept.top_ids is not None, "declared in needs"
    rows = list(zip(*_lists(kept.token_ids, kept.top_ids, kept.next_token_ids), strict=True))
    for first, stop in pairwise(kept.token_offsets.tolist()):
        yield rows[first:stop]


def _of_rejected(rejected: RejectedTokens) -> Iterator[list[Lesson]]:
    """What each request's rejected rows teach."""
    rows = [(token, found, -1) for token, found in zip(*_lists(rejected.token_ids, rejected.top_ids), strict=True)]
    for first, count in zip(*_lists(rejected.start, rejected.num_rejected), strict=True):
        yield rows[first : first + count]


def _lists(*columns: Tensor) -> list[list[Any]]:
    return [column.tolist() for column in columns]


def save_successors(directory: Path, by_namespace: Mapping[str, Mapping[int, Sequence[int]]], vocab_size: int) -> None:
    """Write them below a directory, the namespace used last at the end."""
    items = by_namespace.items()
    entries = ([namespace, [[token, *after] for token, after in rows.items()]] for namespace, rows in items)
    save_lines(directory / FILE_NAME, {"format": FORMAT, "vocab_size": vocab_size}, entries)


def load_successors(directory: Path, vocab_size: int) -> dict[str, dict[int, Sequence[int]]]:
    """What `save_successors` wrote. Raises ConfigError SD-E180 if it does not fit."""
    header, form = {"format": FORMAT, "vocab_size": vocab_size}, f"lists of token ids in 0 .. {vocab_size - 1}"
    is_namespace = partial(_is_namespace, vocab_size)
    entries = load_lines(directory / FILE_NAME, header, is_namespace, f"namespace with {form}", "successors")
    return {namespace: {token: following for token, *following in rows} for namespace, rows in entries}


def _is_namespace(vocab_size: int, entry: Any) -> bool:
    match entry:
        case [str(), [*rows]]:
            return all(isinstance(row, list) and len(row) > 1 and _are_tokens(row, vocab_size) for row in rows)
    return False


def _are_tokens(row: Sequence[Any], vocab_size: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab_size for token in row)
