"""The proposer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field
from specdec.sdk import Draft, Needs, ProposerConfig, Services, StepView, StrictModel, TargetInfo

from .files import open_or_build
from .index import SEPARATOR, CorpusIndex


class RetrievalProposer:
    """Drafts what a corpus says after the longest ending of the text that occurs in it.

    Where it occurs several times, each next token is the one that follows most often, and the places that go on in
    another way are left behind; the draft ends where the estimated probability of the whole becomes too small. So
    common phrases give long drafts and a single weak match a short one.

    The method is that of REST (arXiv 2311.08252), drafting one chain. A token that followed c of n places counts with
    probability c / (n + 1), as in prediction by partial matching (method A): one more for what was never seen.

    There is no state: the index is shared and never changes, and a request's ending is read from the step.
    """

    needs = Needs(history=True)
    default_draft_tokens = 8

    class Options(StrictModel):
        """Keys of `proposer_config`."""

        index: Path = Field(description="the index file; if there is none, it is built from `corpus`")
        corpus: Path | None = Field(default=None, description="a folder of texts, or one file")
        pattern: str = Field(default="**/*", min_length=1, description="which files of the folder, such as **/*.py")
        min_match: int = Field(default=1, ge=1, description="tokens that must agree")
        max_matches: int = Field(
            default=128, ge=1, description="places that are compared, evenly spread over all that match"
        )
        min_probability: float = Field(default=0.3, ge=0, le=1, description="of a draft up to each of its tokens")

    def __init__(self, config: ProposerConfig) -> None:
        self._options: RetrievalProposer.Options = config.options
        self._index: CorpusIndex

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Open the index, or build it. Raises Refusal, with the file's name, if it is of another tokenizer."""
        options = self._options
        self._index = open_or_build(options.index, options.corpus, options.pattern, services.tokenizer)

    def propose(self, step: StepView) -> Draft:
        """One search for each request with a budget."""
        assert step.history is not None, "declared in needs"
        drafts: list[list[int]] = []
        lengths, budgets = step.committed_length.tolist(), step.budget.tolist()
        for b, (length, budget) in enumerate(zip(lengths, budgets, strict=True)):
            ending = step.history.token_ids(b, max(length - self._index.depth, 0))
            drafts.append(self.draft(ending, budget))
        return Draft.from_lists(drafts, step.width)

    def draft(self, text: Sequence[int], k: int) -> list[int]:
        """At most `k` token ids that the corpus has after `text`."""
        if k == 0:
            return []
        places = self._index.matches(text, self._options.min_match).places
        if len(places) > self._options.max_matches:
            places = places[np.linspace(0, len(places) - 1, self._options.max_matches).astype(np.int64)]
        followers = self._index.followers(places, k)  # [n, k]
        draft: list[int] = []
        probability = 1.0
        while len(draft) < k and len(followers):
            column = followers[:, len(draft)]
            candidates, counts = np.unique(column, return_counts=True)
            best = counts.argmax()
            probability *= counts[best] / (len(column) + 1)
            if candidates[best] == SEPARATOR or probability < self._options.min_probability:
                break
            draft.append(int(candidates[best]))
            followers = followers[column == candidates[best]]
        return draft
