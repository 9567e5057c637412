"""The n-gram (prompt lookup) proposer."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.sdk import Draft, Needs, ProposerConfig, RequestView, StepView, StrictModel, TargetInfo
from specdec.sdk.extensions import Trees
from specdec.sdk.trees import Tree

from .index import BranchingIndex, NgramIndex

DEFAULT_MIN_LENGTH = 2
DEFAULT_MAX_LENGTH = 5
MOST_LENGTH = 64
"""Where text repeats, each token has an entry in the index for every length up to its match."""


class NgramProposer:
    """Drafts what followed the longest suffix of a request's tokens where it last occurred in them.

    The tokens are prompt and output so far, the suffix has `prompt_lookup_min` to `prompt_lookup_max` of
    them. The method is prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding),
    without a separate reference text as in arXiv 2304.04487.

    Of several occurrences the most recent is taken, where vLLM and transformers take the earliest: the text
    nearby is the better guide. A draft that reaches the end of the text goes on with its own beginning, or
    text that loops with a short period would get short drafts. `benchmarks/ngram_lookup.py` measures both
    choices.

    With `max_nodes` the continuations of several occurrences are one tree: those of the longest match and of
    the most recent ones.

    Tokens are indexed in `observe`, chunk by chunk as the prompt is computed. The tokens of a request only
    grow: one that was preempted comes back with the same ones in whatever row, so its index stays valid, and
    a text that is computed again adds nothing until it passes what is indexed.
    """

    class Options(StrictModel):
        """Both lengths may be left out (2 and 5); if one is given, the other equals it, as in vLLM."""

        prompt_lookup_min: int | None = Field(
            default=None, ge=1, le=MOST_LENGTH, description="fewest tokens that count as a match"
        )
        prompt_lookup_max: int | None = Field(
            default=None, ge=1, le=MOST_LENGTH, description="most tokens that are compared"
        )

        @property
        def min_length(self) -> int:
            return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_MIN_LENGTH

        @property
        def max_length(self) -> int:
            return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_MAX_LENGTH

        @model_validator(mode="after")
        def _ordered(self) -> Self:
            if self.min_length > self.max_length:
                raise ValueError(
                    f"prompt_lookup_min ({self.min_length}) is above prompt_lookup_max ({self.max_length})"
                )
            return self

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """Token history, and trees where they are asked for."""
        trees = () if config.max_nodes is None else (Trees(),)
        return Needs(history=True, state="per_request", extensions=trees)

    def __init__(self, config: ProposerConfig) -> None:
        self._options: NgramProposer.Options = config.options or self.Options()
        self._depth, self._draws_trees = config.num_draft_tokens, config.max_nodes is not None
        self._indexes: dict[str, NgramIndex] = {}

    def on_start(self, request: RequestView) -> None:
        """Begin an empty index."""
        index = BranchingIndex if self._draws_trees else NgramIndex
        self._indexes[request.request_id] = index(self._options.min_length, self._options.max_length)

    def observe(self, step: StepView) -> None:
        """Index the tokens that were committed since the request was last shown."""
        assert step.history is not None, "declared in needs"
        for b, request_id in enumerate(step.request_ids):
            index = self._indexes[request_id]
            index.extend(step.history.token_ids(b, len(index)))

    def propose(self, step: StepView) -> Draft:
        """Draft a continuation for each request with a match, as long as its budget, or a tree of as many nodes."""
        wanted = zip(step.request_ids, step.budget.tolist(), strict=True)
        if self._draws_trees:
            trees = [self._tree(name, budget) for name, budget in wanted]
            return Draft.from_trees(trees, step.width)
        drafts = [self._indexes[request_id].continuation(budget) for request_id, budget in wanted]
        return Draft.from_lists(drafts, step.width)

    def on_finish(self, request: RequestView) -> None:
        """Drop the index."""
        del self._indexes[request.request_id]

    def _tree(self, request_id: str, budget: int) -> Tree:
        index = self._indexes[request_id]
        assert isinstance(index, BranchingIndex), "made where trees are asked for"
        return index.tree(budget, self._depth)
