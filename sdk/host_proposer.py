"""A base for proposers in plain Python: one method, one request, lists of ints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from functools import cached_property

from .config import ProposerConfig
from .needs import Needs
from .types import Draft, RequestView, StepView


class HostProposer(ABC):
    """A base class that needs only `draft`.

    The base keeps the token list of each request and appends committed tokens, so a step costs no copy of the history.
    The base owns this list: read it, and do not change it.
    """

    needs = Needs(history=True, state="per_request")

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config

    @cached_property
    def _tokens(self) -> dict[str, list[int]]:  # not made by __init__, which authors override without calling it
        return {}

    @abstractmethod
    def draft(self, tokens: Sequence[int], k: int) -> Sequence[int]:
        """Token ids that may follow. An empty result means no draft.

        tokens: the prompt and the output so far.
        k: the most token ids to return.
        """

    def propose(self, step: StepView) -> Draft:
        """One call of `draft` per request with a budget."""
        if step.history is None:
            raise TypeError("HostProposer reads step.history, which is None: declare needs = Needs(history=True, ...)")
        drafts: list[Sequence[int]] = []
        places = zip(
            step.request_ids,
            step.rows.tolist(),
            step.committed_length.tolist(),
            step.budget.tolist(),
            strict=True,
        )
        for request_id, row, length, budget in places:
            if budget == 0:
                drafts.append(())
                continue
            tokens = self._tokens.setdefault(request_id, [])
            tokens.extend(step.history[row, len(tokens) : length].tolist())
            drafts.append(_token_ids(self.draft(tokens, budget)))
        return Draft.from_lists(drafts, step.num_draft_tokens)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request's tokens."""
        self._tokens.pop(request.request_id, None)


def _token_ids(returned: Sequence[int]) -> Sequence[int]:
    """What `draft` returned. Raises TypeError, with what it has to return, for None, a number or a text."""
    if isinstance(returned, str) or not isinstance(returned, Sized):
        found = "None" if returned is None else repr(type(returned).__name__)
        raise TypeError(f"draft returned {found}; it returns a list of token ids, and [] for no idea")
    return returned
