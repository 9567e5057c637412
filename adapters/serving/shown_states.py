"""Hidden states that came with a client's steps, until the proposer is shown them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specdec.core.host import Request, Scheduled
from specdec.sdk.errors import RequestError
from specdec.sdk.shared_states import SharedStates
from specdec.sdk.types import TargetInfo
from specdec.sdk.wire import Row


class ShownStates:
    """Keeps them by request, from the first token on that the proposer has not seen."""

    def __init__(self, target: TargetInfo, num_states: int, descriptor: int | None) -> None:
        """`num_states`: of each position. `descriptor`: as `SharedStates` takes it."""
        self._shared, self._count = SharedStates(target, num_states, descriptor), num_states
        self._device = torch.device(target.device)
        self._waiting: dict[str, Tensor] = {}  # [n, L*H] by request

    def take(self, rows: Sequence[tuple[str, Row]], counts: Sequence[int], requests: Mapping[str, Request]) -> None:
        """Read what came with a step: so many for each row of a request's name.

        requests: those that the rows continue. Raises RequestError unless there are as many as their tokens lack.
        """
        self._waiting.clear()
        try:
            parts = torch.split(self._shared.read(sum(counts)).to(self._device), [*counts])
            pairs = list(zip(rows, parts, strict=True))
        except ValueError as error:
            raise RequestError("SD-E331", "a client sent no hidden states", {"because": str(error)}) from error
        for (name, row), states in pairs:
            request = requests.get(name)
            if request is None:
                continue
            lacking = row.start + len(row.tokens) - 1 - request.num_computed_tokens
            if len(states) != lacking:
                facts = {"request": request.request_id, "expected": lacking, "found": len(states)}
                raise RequestError("SD-E331", "a client sent hidden states of other tokens", facts)
            self._waiting[request.request_id] = states

    def of(self, shares: Sequence[Scheduled]) -> list[Tensor]:
        """Hand out the states of a step's tokens: L of [N, H]."""
        parts: list[Tensor] = []
        for share in shares:
            states = self._waiting.pop(share.request.request_id)
            parts.append(states[: share.num_rows])
            if len(states) > share.num_rows:
                self._waiting[share.request.request_id] = states[share.num_rows :]
        return list(torch.cat(parts).chunk(self._count, dim=1))
