"""One step of vLLM's runner: what it computed, for which requests, in the order of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.needs import Needs


@dataclass(frozen=True)
class EngineStep:
    """Letters: B requests, N tokens computed, drafts included."""

    request_ids: tuple[str, ...]  # [B]
    states: Mapping[str, Any]  # request id -> vLLM's CachedRequestState
    starts: Sequence[int]  # [B] position of each request's first computed token
    num_tokens: Mapping[str, int]  # request id -> tokens computed
    drafts: Mapping[str, list[int]]  # request id -> the drafts among them
    input_ids: Tensor  # [N or more] int32, vLLM's own
    input_positions: Tensor  # [N or more] int64
    hidden: Tensor | None  # [N, L*H]
    num_draft_tokens: int  # the most drafts that vLLM verifies in the next step
    logits: Tensor | None = None  # [R, V], 1 + drafts rows of each request. None: nobody asked for them

    @cached_property
    def token_ids(self) -> Tensor:
        """[N] int64."""
        return self.input_ids[: self._total].long()

    @cached_property
    def positions(self) -> Tensor:
        """[N] int64."""
        return self.input_positions[: self._total]

    @cached_property
    def first_rows(self) -> dict[str, int]:
        """Where the rows of each request in `logits` begin."""
        counts = (1 + len(self.drafts.get(request_id, ())) for request_id in self.request_ids)
        return dict(zip(self.request_ids, accumulate(counts, initial=0), strict=False))

    @property
    def _total(self) -> int:
        return sum(self.num_tokens.values())

    @classmethod
    def read(
        cls,
        runner: Any,
        scheduled: Any,
        final: Tensor,
        between: Sequence[Tensor] | None,
        needs: Needs,
        logits: Tensor | None = None,
    ) -> EngineStep:
        """From the runner and what its scheduler asked for, after sampling; `final` and `between`: hidden states."""
        batch = runner.input_batch
        return cls(
            request_ids=tuple(batch.req_ids),
            states=runner.requests,
            starts=batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist(),
            num_tokens=scheduled.num_scheduled_tokens,
            drafts=scheduled.scheduled_spec_decode_tokens,
            input_ids=runner.input_ids.gpu,
            input_positions=runner.positions,
            hidden=_hidden(runner, scheduled, final, between, needs) if needs.hidden_states else None,
            num_draft_tokens=scheduled.num_spec_tokens_to_schedule,
            logits=logits,
        )


def _hidden(runner: Any, scheduled: Any, final: Tensor, between: Sequence[Tensor] | None, needs: Needs) -> Tensor:
    """The states that are wanted, in that order: [N, L*H]."""
    total = scheduled.total_num_scheduled_tokens
    states = dict(zip(boundaries(needs), between or (), strict=True)) | {"final": final}
    if 0 in needs.hidden_states:
        states[0] = runner.get_model().embed_input_ids(runner.input_ids.gpu[:total].long())
    return torch.cat([states[each][:total] for each in needs.hidden_states], dim=-1)


def boundaries(needs: Needs) -> tuple[int, ...]:
    """The states between layers that vLLM is asked for, in the order in which it returns them.

    Not the input of the first layer, which is the embedding: the layers add to it in place after vLLM has noted it.
    """
    return tuple(sorted({each for each in needs.hidden_states if each != "final" and each != 0}))
