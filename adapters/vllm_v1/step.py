"""Read a step of the V1 runner from the runner and what its scheduler asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from specdec.sdk.needs import Needs

from ..vllm_shared.engine_step import EngineStep, hidden_states


def read_step(
    runner: Any,
    scheduled: Any,
    final: Tensor,
    between: Sequence[Tensor] | None,
    needs: Needs,
    logits: Tensor | None = None,
) -> EngineStep:
    """Read a step after sampling. `final` and `between`: hidden states. logits: as `EngineStep` has them."""
    batch = runner.input_batch
    token_ids = runner.input_ids.gpu[: scheduled.total_num_scheduled_tokens]
    return EngineStep(
        request_ids=tuple(batch.req_ids),
        states=runner.requests,
        starts=batch.num_computed_tokens_cpu[: len(batch.req_ids)].tolist(),
        num_tokens=scheduled.num_scheduled_tokens,
        drafts=_without_padding(scheduled.scheduled_spec_decode_tokens),
        input_ids=runner.input_ids.gpu,
        input_positions=runner.positions,
        hidden=hidden_states(needs, token_ids, final, between, runner.get_model().embed_input_ids),
        num_draft_tokens=scheduled.num_spec_tokens_to_schedule,
        logits=logits,
        first_rows=() if logits is None else _first_rows(batch.req_ids, scheduled.scheduled_spec_decode_tokens),
    )


def _without_padding(drafts: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """vLLM fills up the first step of a request of which one token is to be computed: with -1, which is no draft."""
    return {request_id: [each for each in ids if each >= 0] for request_id, ids in drafts.items()}


def _first_rows(request_ids: Sequence[str], drafts: Mapping[str, Sequence[int]]) -> list[int]:
    """Each request's first row in the logits, which have a row for each of its drafts and one more."""
    counts = [1 + len(drafts.get(request_id, ())) for request_id in request_ids]
    return list(accumulate(counts[:-1], initial=0))
