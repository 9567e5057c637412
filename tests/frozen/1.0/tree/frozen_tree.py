"""A tree of the tokens that followed in any text: two where two were seen. What was learned is kept on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.sdk import Draft, Needs, ProposerBase, ProposerConfig, StepView, TargetInfo
from specdec.sdk.extensions import State, Trees


class Tree(ProposerBase):
    api_version = "1.0"

    @classmethod
    def needs(cls, config: ProposerConfig[Any], target: TargetInfo) -> Needs:
        """Trees where there are trees, else chains."""
        trees = (Trees(),) if Trees.id in target.extensions and config.max_nodes else ()
        return Needs(history=True, state="shared", extensions=(*trees, State()))

    def __init__(self, config: ProposerConfig[Any]) -> None:
        super().__init__(config)
        self.ways = 2 if config.max_nodes else 1
        self.followers: dict[str, dict[int, list[int]]] = {}  # namespace -> token -> the newest follower first

    def observe(self, step: StepView) -> None:
        kept = step.kept
        for place in sorted(range(len(step)), key=step.request_ids.__getitem__):
            learned = self.followers.setdefault(step.requests[place].namespace, {})
            first = int(kept.token_offsets[place])
            entries = slice(first, first + int(kept.num_kept[place]))
            for token, following in zip(
                kept.token_ids[entries].tolist(), kept.next_token_ids[entries].tolist(), strict=True
            ):
                ways = learned.setdefault(token, [])
                if following in ways:
                    ways.remove(following)
                ways.insert(0, following)

    def propose(self, step: StepView) -> Draft:
        assert step.history is not None
        trees = [
            self.tree(step.requests[b].namespace, step.history.token_ids(b)[-1], budget)
            for b, budget in enumerate(step.budget.tolist())
        ]
        if self.config.max_nodes:
            return Draft.from_trees(trees, step.width)
        return Draft.from_lists([[token for _, token in tree] for tree in trees], step.width)

    def tree(self, namespace: str, newest: int, budget: int) -> list[tuple[int, int]]:
        learned = self.followers.get(namespace, {})
        nodes: list[tuple[int, int]] = []
        waiting = [(-1, newest, 0)]
        while waiting and len(nodes) < budget:
            parent, token, depth = waiting.pop(0)
            for following in learned.get(token, [])[: self.ways]:
                if len(nodes) < budget and depth < self.config.num_draft_tokens:
                    nodes.append((parent, following))
                    waiting.append((len(nodes) - 1, following, depth + 1))
        return nodes

    def save(self, path: Path) -> None:
        (path / "followers.json").write_text(json.dumps(self.followers))

    def load(self, path: Path) -> None:
        saved = json.loads((path / "followers.json").read_text())
        self.followers = {name: {int(token): ways for token, ways in each.items()} for name, each in saved.items()}
