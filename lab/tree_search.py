"""The best static tree for heads that draft all positions at once, by what they would have drafted on a recording.

At every place of a text each head ranks the token that really came. These ranks, from the first head on, are the path
of the place. A node of a tree is right at a place if the place's path begins with the node's own. So the tree with the
most frequent beginnings is the best one of its size, and no head is taken to be independent of another
(arXiv 2401.10774 takes products of accuracies).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.core.rejection.types import DistributionKind, DraftRows
from specdec.sdk.errors import Refusal

from .recording import RecordedRequest, Recording
from .replay.run import replay

RankPath = tuple[int, ...]


@dataclass
class RankListener:
    """The path of every place that was drafted for, by request."""

    paths: dict[str, list[RankPath]] = field(default_factory=dict)

    def __call__(self, drafts: DraftRows, rows: Sequence[tuple[RecordedRequest, int]], reached: Sequence[int]) -> None:
        """Take one step's distributions in. rows: each request, and its number of output tokens."""
        reported = drafts.distributions
        if reported is None or reported.sparse_ids is None:
            return
        lengths, kinds = drafts.lengths.tolist(), reported.kind.tolist()
        for ids, (request, start), length, kind in zip(reported.sparse_ids.tolist(), rows, lengths, kinds, strict=True):
            if length and kind == DistributionKind.SPARSE:
                path = rank_path(ids[:length], request.token_ids[start : start + length])
                self.paths.setdefault(request.request_id, []).append(path)


def rank_path(choices: Sequence[Sequence[int]], said: Sequence[int]) -> RankPath:
    """Where each token stands among the choices for its position, up to the first that is not among them."""
    path: list[int] = []
    for ids, token_id in zip(choices, said, strict=False):
        if token_id not in ids:
            break
        path.append(ids.index(token_id))
    return tuple(path)


def best_tree(paths: Iterable[RankPath], num_nodes: int) -> list[RankPath]:
    """The most frequent beginnings of paths, the most frequent first: each stands behind its own beginning."""
    counts = Counter(path[:length] for path in paths for length in range(1, len(path) + 1))
    return sorted(counts, key=lambda node: (-counts[node], len(node), node))[:num_nodes]


def tokens_per_verification(tree: Sequence[RankPath], paths: Sequence[RankPath]) -> float:
    """Tokens per verification, averaged over all places: the tree's right nodes there, and one more token."""
    nodes = set(tree)
    right = sum(path[:length] in nodes for path in paths for length in range(1, len(path) + 1))
    return 1 + right / len(paths)


def search_tree(
    folder: Path,
    speculative_config: SpeculativeSettings,
    num_nodes: int,
    plugins: PluginSettings,
    *,
    model: str | Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """The tree of `num_nodes` nodes, and what it is expected to give.

    Expectations are those of a tree that was found on every other request, for the requests between them. They are None
    where there is one request only. Raises Refusal for a drafter that reports no sparse distributions; errors of
    `replay`.
    """
    recording, listener = Recording.open_filled(folder), RankListener()
    asked = SpeculativeConfig.as_mapping(speculative_config) | {"draft_sample_method": "probabilistic"}
    for key in ("max_nodes", "medusa_choices"):
        asked.pop(key, None)
    replayed = replay(
        recording,
        asked,
        plugins,
        model=model,
        device=device,
        listener=listener,
        temperature=1.0,
        teacher_forced=True,
    )
    if not listener.paths:
        raise Refusal("the drafter reports no sparse distribution on this recording", "Medusa heads, and longer texts")
    by_request = list(listener.paths.values())
    fitted, held_out = (list(chain.from_iterable(by_request[first::2])) for first in (0, 1))
    every = [*fitted, *held_out]
    found, first_choices = best_tree(fitted, num_nodes), [(0,) * length for length in range(1, num_nodes + 1)]
    return {
        "proposer": replayed.proposer,
        "num_places": len(every),
        "choices": [list(node) for node in best_tree(every, num_nodes)],
        "expected_of_chain": tokens_per_verification(first_choices, held_out) if held_out else None,
        "expected_of_tree": tokens_per_verification(found, held_out) if held_out else None,
    }
