"""A proposer on the documented base: a tree of followers, with request options in the step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from typing_extensions import override

from specdec.sdk import Draft, Needs, ProposerBase, ProposerConfig, RequestView, StepView, StrictModel
from specdec.sdk.extensions import State, StateMethods
from specdec.sdk.trees import Tree, best_first


class Followers(ProposerBase, StateMethods):
    needs = Needs(history=True, state="shared", extensions=("trees@1", State()))
    default_draft_tokens = 8

    class Options(StrictModel):
        most_branches: int = 4

    class RequestOptions(StrictModel):
        depth: int = 3

    def __init__(self, config: ProposerConfig[Options]) -> None:
        super().__init__(config)
        self._most_branches = config.options.most_branches
        self._counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._read: dict[str, int] = {}

    @override
    def on_start(self, request: RequestView[RequestOptions]) -> None:
        self._read[request.request_id] = request.options.depth

    @override
    def on_finish(self, request: RequestView) -> None:
        super().on_finish(request)
        del self._read[request.request_id]

    @override
    def save(self, folder: Path) -> None:
        (folder / "counts").write_text(str(self._counts))

    @override
    def load(self, path: Path) -> None:
        (path / "counts").read_text()

    @override
    def propose(self, step: StepView[RequestOptions]) -> Draft:
        assert step.history is not None
        trees: list[Tree] = []
        for place, request in enumerate(step.requests):
            tokens = step.history.token_ids(place)
            for token, following in pairwise(tokens):
                self._counts[token][following] += 1
            tree, _ = best_first(self._children, tokens[-1], int(step.budget[place]), request.options.depth)
            trees.append(tree)
        return Draft.from_trees(trees, step.width)

    def _children(self, token: int) -> Iterator[tuple[int, float, int]]:
        counts = self._counts[token]
        for following, count in counts.most_common(self._most_branches):
            yield following, count / counts.total(), following
