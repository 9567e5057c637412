"""One step of vLLM's runner: what it computed, for which requests, in the order of its batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...needs import Needs


@dataclass(frozen=True)
class EngineStep:
    """Letters: B requests, N tokens computed, drafts included."""

    request_ids: tuple[str, ...]  # [B]
    states: Mapping[str, Any]  # request id -> vLLM's CachedRequestState
    starts: Sequence[int]  # [B] position of each request's first computed token
    num_tokens: Mapping[str, int]  # request id -> tokens computed
    drafts: Mapping[str, list[int]]  # request id -> the drafts among them
    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    hidden: Tensor | None  # [N, L*H]
    num_draft_tokens: int  # the most drafts that vLLM verifies in the next step

    @classmethod
    def read(
        cls, runner: Any, scheduled: Any, final: Tensor, between: Sequence[Tensor] | None, needs: Needs
    ) -> EngineStep:
        """From the runner and what its scheduler asked for, after sampling; `final` and `between`: hidden states."""
        batch = runner.input_batch
        total = scheduled.total_num_scheduled_tokens
        token_ids = runner.input_ids.gpu[:total].long()
        states = dict(zip(boundaries(needs), between or (), strict=True)) | {"final": final}
        if 0 in needs.hidden_states:
            states[0] = runner.get_model().embed_input_ids(token_ids)
        wanted = [states[each][:total] for each in needs.hidden_states]
        return cls(
            request_ids=tuple(batch.req_ids),
            states=runner.requests,
            starts=batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist(),
            num_tokens=scheduled.num_scheduled_tokens,
            drafts=scheduled.scheduled_spec_decode_tokens,
            token_ids=token_ids,
            positions=runner.positions[:total],
            hidden=torch.cat(wanted, dim=-1) if wanted else None,
            num_draft_tokens=scheduled.num_spec_tokens_to_schedule,
        )


def boundaries(needs: Needs) -> tuple[int, ...]:
    """The states between layers that vLLM is asked for, in the order in which it returns them.

    Not the input of the first layer, which is the embedding: the layers add to it in place after vLLM has noted it.
    """
    return tuple(sorted({each for each in needs.hidden_states if each != "final" and each != 0}))
