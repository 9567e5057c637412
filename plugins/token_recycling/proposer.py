"""The Token Recycling proposer, whose drafts are chains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from pydantic import Field
from torch import Tensor

from specdec.sdk import Draft, KeptRows, Needs, ProposerConfig, RejectedRows, RequestView, StepView, StrictModel

Successors = dict[int, int]
"""The likeliest next token after each token, as the target computed it last."""


class TokenRecyclingProposer:
    """Drafts the token that the target last found likeliest after the newest one, then the one after that, and so on.

    The method is Token Recycling (arXiv 2408.08696). The paper keeps eight successors of each token and drafts a tree.
    A chain follows the likeliest successor only, so one is kept. The target computes logits after every draft that it
    verifies, and those after rejected drafts are learned too. A prompt has logits in its last row only. After its other
    tokens the token that follows in the prompt is learned instead.

    Successors are shared by the requests of a namespace, as in the paper. They live until the process ends.
    """

    needs = Needs(target_top_k=1, rejected_rows=True, state="shared")
    default_draft_tokens = 3
    """A chain of single successors is seldom right for longer."""

    class Options(StrictModel):
        """Options of the token_recycling proposer."""

        max_namespaces: int = Field(64, ge=1, description="namespaces whose successors are kept, the last ones used")

    def __init__(self, config: ProposerConfig) -> None:
        options: TokenRecyclingProposer.Options = config.options or self.Options()
        self._max_namespaces = options.max_namespaces
        self._successors: dict[str, Successors] = {}  # by namespace, the last one used comes last
        self._namespaces: dict[str, str] = {}  # by request

    def on_start(self, request: RequestView) -> None:
        """Use the successors of its namespace, and forget those used longest ago."""
        self._namespaces[request.request_id] = request.namespace
        self._successors[request.namespace] = self._successors.pop(request.namespace, {})
        while len(self._successors) > self._max_namespaces:
            del self._successors[next(iter(self._successors))]

    def observe(self, step: StepView) -> None:
        """Learn what the target computed: after rejected drafts first, so that the text itself has the last word."""
        assert step.rejected is not None, "declared in needs"
        rejected, kept = list(_of_rejected(step.rejected)), list(_of_kept(step.kept))
        for request_id, b in sorted(zip(step.request_ids, range(len(step)), strict=True)):
            self._of(request_id).update(rejected[b] | kept[b])

    def propose(self, step: StepView) -> Draft:
        """A chain of successors for each request, as long as its budget or until a token has none."""
        wanted = zip(step.request_ids, step.newest_token.tolist(), step.budget.tolist(), strict=True)
        drafts = [list(_chain(self._of(name), token, budget)) for name, token, budget in wanted]
        return Draft.from_lists(drafts, step.num_draft_tokens)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request; what was learned of it stays."""
        del self._namespaces[request.request_id]

    def _of(self, request_id: str) -> Successors:
        return self._successors.setdefault(self._namespaces[request_id], {})


def _chain(successors: Mapping[int, int], token: int, length: int) -> Iterator[int]:
    for _ in range(length):
        following = successors.get(token)
        if following is None:
            return
        token = following
        yield token


def _of_kept(kept: KeptRows) -> Iterator[Successors]:
    """What each request's kept rows teach."""
    assert kept.top_ids is not None, "declared in needs"
    token_ids, found, followed = _lists(kept.token_ids, kept.top_ids[:, 0], kept.next_token_ids)
    for first, stop in pairwise(kept.cu_rows.tolist()):
        rows = zip(token_ids[first:stop], found[first:stop], followed[first:stop], strict=True)
        yield {token: best if best >= 0 else following for token, best, following in rows}


def _of_rejected(rejected: RejectedRows) -> Iterator[Successors]:
    """What each request's rejected rows teach."""
    token_ids, found = _lists(rejected.token_ids, rejected.top_ids[:, 0])
    for first, count in zip(*_lists(rejected.start, rejected.num_rejected), strict=True):
        yield dict(zip(token_ids[first : first + count], found[first : first + count], strict=True))


def _lists(*columns: Tensor) -> list[list[int]]:
    return [column.tolist() for column in columns]
