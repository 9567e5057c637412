"""Whether the parents in a draft are trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.trees import depths
from specdec.sdk.types import DistributionKind, Draft

from .draft_table import DraftReport

TreeError = tuple[str, str, Mapping[str, object]]


def tree_error(
    reports: Sequence[DraftReport], request_ids: Sequence[str], max_depth: int | None, *, replacement: bool
) -> TreeError | None:
    """Code, summary and facts of the first thing that is wrong with the parents of drafts. None: nothing is.

    max_depth: the most nodes on a path. None means any number. replacement: see `DraftDistribution`.
    """
    for b, each in enumerate(reports):
        may_repeat = replacement and each.kind != DistributionKind.ONE_HOT
        parents = (each.parents or [])[: each.length]
        found = _wrong(parents, each.token_ids, max_depth, may_repeat=may_repeat)
        if found is not None:
            code, summary, facts = found
            return code, summary, {"request": f"{request_ids[b]!r}, row {b} of the step", **facts}
    return None


def _wrong(
    parents: Sequence[int], token_ids: Sequence[int], max_depth: int | None, *, may_repeat: bool
) -> TreeError | None:
    seen: set[tuple[int, int]] = set()
    for node, (parent, token) in enumerate(zip(parents, token_ids, strict=False)):
        if not -1 <= parent < node:
            facts = {"node": node, "expected": f"-1 .. {node - 1}", "found": parent}
            fix = "put nodes in the order in which they were drawn; -1 is the newest token"
            return "SD-E291", "a node hangs from no earlier node", {**facts, "fix": fix}
        if (parent, token) in seen and not may_repeat:
            facts = {"node": node, "parent": parent, "token": token}
            fix = (
                "merge equal siblings (tree_of_paths does); draw each sibling from what the earlier ones leave, "
                "or say DraftDistribution(replacement=True)"
            )
            return "SD-E292", "two siblings have the same token", {**facts, "fix": fix}
        seen.add((parent, token))
    deepest = max(depths(parents), default=0)
    if max_depth is not None and deepest > max_depth:
        facts = {"expected": f"at most {max_depth}", "found": deepest, "fix": "raise num_speculative_tokens"}
        return "SD-E293", "a tree is deeper than was asked for", facts
    return None


def by_node(draft: Draft) -> Draft:
    """The same with distributions by node instead of by place: row i is what node i was drawn from, as in a chain.

    Earlier siblings are not taken out.
    """
    assert draft.parents is not None, "a chain has both already"
    if draft.distribution is None:
        return draft
    places = (draft.parents.long() + 1).clamp(0, draft.parents.shape[1] - 1)
    rows = torch.arange(len(places), device=places.device)[:, None]
    held = vars(draft.distribution).items()
    tables: dict[str, Any] = {
        name: each[rows, places] for name, each in held if isinstance(each, Tensor) and name != "kind"
    }
    return replace(draft, distribution=replace(draft.distribution, **tables))
