"""A step as a proposer on the host sees it. Most read few of its tensors: each is made when it is read first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from specdec.sdk import KeptRows, SamplingView, StepView

from ..cache.transfer import on_host
from ..request.committed import COLUMNS, Committed
from .step_random import StepRandom


class HostView(StepView):
    """Made of records that no later step changes, so that it does not matter when a field is read.

    A copy by `dataclasses.replace` holds all fields.
    """

    @classmethod
    def of(
        cls,
        committed: Sequence[Committed],
        budgets: Sequence[int],
        num_draft_tokens: int,
        hidden: Tensor | None,  # [N, L*H] of the kept rows
        sampling: SamplingView | None,
        history: Tensor | None,
    ) -> HostView:
        """The view of requests that go on."""
        view = object.__new__(cls)  # not by the constructor, which wants every field
        vars(view).update(
            request_ids=tuple([each.request.request_id for each in committed]),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            history=history,
            _committed=committed,
            _budgets=budgets,
            _hidden=hidden,
        )
        return view

    def __getattr__(self, name: str) -> Any:
        """A field that is read for the first time."""
        made: Any
        if name in COLUMNS:
            made = on_host(map(COLUMNS[name], self._committed))
        elif name == "budget":
            made = on_host(self._budgets)
        elif name == "kept":
            made = _kept_rows(self._committed, self._hidden)
        elif name == "random":
            made = StepRandom(on_host(each.request.draft_key for each in self._committed), self.committed_length)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        vars(self)[name] = made
        return made


def _kept_rows(committed: Sequence[Committed], hidden: Tensor | None) -> KeptRows:
    """Of every request only the rows that survived, whose tokens the host knows."""
    counts = [each.num_kept for each in committed]
    positions: list[int] = []
    token_ids: list[int] = []
    next_token_ids: list[int] = []
    for each in committed:
        first, stop, text = each.first_position, each.first_position + each.num_kept, each.request.token_ids
        positions += range(first, stop)
        token_ids += text[first:stop]
        next_token_ids += text[first + 1 : stop + 1]
    columns = {
        "cu_rows": list(accumulate(counts, initial=0)),
        "num_kept": counts,
        "kept_start": [each.first_position for each in committed],
        "positions": positions,
        "token_ids": token_ids,
        "next_token_ids": next_token_ids,
    }
    tensors = {name: on_host(column) for name, column in columns.items()}
    return KeptRows(**tensors, hidden=hidden, most_rows=None)
