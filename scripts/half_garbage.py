"""Proposers that know what a target will say and lie in half of their drafts: for checks of types of targets."""

from __future__ import annotations

from specdec.sdk import Draft, Needs, ProposerConfig, RequestView, StepView, StrictModel
from specdec.sdk.extensions import Trees


class HalfGarbage:
    """Drafts a known text; of every four positions two hold another token."""

    needs = Needs()

    class Options(StrictModel):
        """What is known."""

        texts: tuple[tuple[int, ...], ...]  # prompts with what follows them

    def __init__(self, config: ProposerConfig) -> None:
        self._texts: tuple[tuple[int, ...], ...] = config.options.texts
        self._known: dict[str, tuple[int, ...]] = {}

    def on_start(self, request: RequestView) -> None:
        """Find the text that begins with the prompt."""
        prompt = tuple(request.prompt_token_ids)
        self._known[request.request_id] = next(text for text in self._texts if text[: len(prompt)] == prompt)

    def observe(self, step: StepView) -> None:
        """Nothing is learned."""

    def propose(self, step: StepView) -> Draft:
        """As many tokens as each request may take."""
        wanted = zip(step.request_ids, step.committed_length.tolist(), step.budget.tolist(), strict=True)
        return Draft.from_lists([self._draft(*each) for each in wanted], step.width)

    def _draft(self, request_id: str, start: int, budget: int) -> list[int]:
        true = self._known[request_id][start : start + budget]
        return [token if position % 4 < 2 else token ^ 1 for position, token in enumerate(true, start)]


class HalfGarbageTree(HalfGarbage):
    """Drafts a known text as a tree: every other true node is a second child, and garbage has a child of its own."""

    needs = Needs(extensions=(Trees(),))

    def propose(self, step: StepView) -> Draft:
        """As many nodes as each request may take."""
        wanted = zip(step.request_ids, step.committed_length.tolist(), step.budget.tolist(), strict=True)
        return Draft.from_trees([self._tree(*each) for each in wanted], step.width)

    def _tree(self, request_id: str, start: int, budget: int) -> list[tuple[int, int]]:
        nodes: list[tuple[int, int]] = []
        newest = -1
        for position, token in enumerate(self._known[request_id][start : start + budget], start):
            if position % 2:  # a wrong sibling, and what follows it, come first
                nodes += [(newest, token ^ 1), (len(nodes), token)]
            nodes.append((newest, token))
            newest = len(nodes) - 1
        return nodes[:budget]


class HalfGarbageWithStates(HalfGarbage):
    """The same; it is shown hidden states."""

    needs = Needs(hidden_states=(1, "final"))
