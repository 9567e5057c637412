"""A base for proposers in plain Python: one method, one request, lists of ints."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from .needs import Needs
from .proposer_protocol import ProposerBase
from .types import Draft, RequestView, StepView


class ReadTokens(list[int]):
    """A request's tokens as its author is shown them: a list to read, which only its keeper makes longer.

    Reads at a list's own speed. What would change it raises TypeError; slices and copies are plain lists.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("draft only reads the tokens it is given, which stay the base's own: change list(tokens)")

    if not TYPE_CHECKING:  # where it is a list like any other
        append = extend = insert = remove = pop = clear = sort = reverse = _refuse
        __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)

    def commit(self, token_ids: Iterable[int]) -> None:
        """Add what was committed: for the keeper only."""
        super().extend(token_ids)


class HostProposer(ProposerBase):
    """A base class that needs only `draft`.

    The base keeps the token list of each request and appends committed tokens, so a step costs no copy of the history.
    The base owns this list: read it, or change a copy. Whatever would change the list itself raises TypeError.
    `on_finish` drops it: an `on_finish` of your own calls `super().on_finish(request)`.
    """

    needs: Needs | Callable[..., Needs] = Needs(history=True, state="per_request")

    @cached_property
    def _tokens(self) -> dict[str, ReadTokens]:  # not made by __init__, which authors override without calling it
        return {}

    @abstractmethod
    def draft(self, request: RequestView[Any], tokens: Sequence[int], k: int, /) -> Sequence[int]:
        """Token ids that may follow. An empty result means no draft.

        request: whose text it is; `request.options` are its RequestOptions.
        tokens: the prompt and the output so far.
        k: the most token ids to return.
        """

    def propose(self, step: StepView, /) -> Draft:
        """Call `draft` once per request with a budget."""
        drafts: dict[str, Sequence[int]] = {}
        for request, tokens, budget in self.wanting(step):
            drafts[request.request_id] = returned_ids("draft", self.draft(request, tokens, budget))
        return Draft.from_lists([drafts.get(each, ()) for each in step.request_ids], step.width)

    def wanting(self, step: StepView) -> Iterator[tuple[RequestView[Any], Sequence[int], int]]:
        """Yield each request that wants a draft, its tokens and its budget. Dummy steps have none."""
        if step.history is None:
            raise TypeError("HostProposer reads step.history, which is None: declare needs = Needs(history=True, ...)")
        for place, (request, budget) in enumerate(zip(step.requests, step.budget.tolist(), strict=True)):
            if budget and not step.dummy:
                tokens = self._tokens.setdefault(request.request_id, ReadTokens())
                tokens.commit(step.history.token_ids(place, len(tokens)))
                yield request, tokens, budget

    def on_finish(self, request: RequestView, /) -> None:
        """Forget the request's tokens."""
        self._tokens.pop(request.request_id, None)


def returned_ids(method: str, returned: Sequence[int]) -> Sequence[int]:
    """What `draft` or `ask` returned. Raises TypeError, with what it has to return, for None, a number or a text."""
    if isinstance(returned, str) or not isinstance(returned, Sized):
        found = "None" if returned is None else repr(type(returned).__name__)
        raise TypeError(f"{method} returned {found}; it returns a list of token ids, and [] for no idea")
    return returned
