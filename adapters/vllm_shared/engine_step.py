"""A step of vLLM's runner: what it computed, for which requests, in the order of its batch; drafts made after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from specdec.core.host import TakenDrafts, rejection
from specdec.sdk.errors import Refusal
from specdec.sdk.needs import Needs


@dataclass(frozen=True)
class EngineStep:
    """Letters: B requests, N tokens computed, drafts included."""

    request_ids: tuple[str, ...]  # [B]
    states: Mapping[str, Any]  # request id -> what vLLM's worker knows of it: prompt_token_ids, sampling_params
    starts: Sequence[int]  # [B] position of each request's first computed token
    num_tokens: Mapping[str, int]  # request id -> tokens computed
    drafts: Mapping[str, list[int]]  # request id -> the drafts among them
    input_ids: Tensor  # [N or more] int32, vLLM's own
    input_positions: Tensor  # [N or more] int64
    hidden: Sequence[Tensor]  # L of [N, H]
    num_draft_tokens: int  # the most drafts that vLLM verifies in the next step
    logits: Tensor | None = None  # [R, V] of the rows that were sampled from. None: nobody wants them
    first_rows: Sequence[int] = ()  # [B] where the rows of each request in `logits` begin

    @cached_property
    def token_ids(self) -> Tensor:
        """[N] int64."""
        return self.input_ids[: self.num_computed].long()

    @cached_property
    def positions(self) -> Tensor:
        """[N] int64."""
        return self.input_positions[: self.num_computed]

    @property
    def num_computed(self) -> int:
        """N."""
        return sum(self.num_tokens.values())


@dataclass(frozen=True)
class UnreadDrafts:
    """Drafts that stay on the device, of P of a step's requests: those that may have drafts."""

    request_ids: Sequence[str]  # [P]
    places: Tensor  # [P] int64, where in the step's batch each request stands
    token_ids: Tensor  # [P, K] int64, negative where there is no draft that can be verified
    numbers: Tensor  # [P, 3 + K] int64, what the host reads of them with its next read
    distributions: rejection.DraftDistributions | None  # of the P requests. None: every draft is one-hot
    taken: TakenDrafts


def hidden_states(
    needs: Needs,
    token_ids: Tensor,
    final: Tensor,
    between: Sequence[Tensor] | None,
    embed: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:
    """The states that are wanted, in that order: L of [N, H].

    token_ids: [N]. final, between: [N or more, H], the latter by `boundaries`. embed: the target's own.
    """
    if not needs.hidden_states:
        return ()
    states = dict(zip(boundaries(needs), between or (), strict=True)) | {"final": final}
    if 0 in needs.hidden_states:
        states[0] = embed(token_ids.long())
    return tuple([states[each][: len(token_ids)] for each in needs.hidden_states])


def boundaries(needs: Needs) -> tuple[int, ...]:
    """The states between layers that vLLM is asked for, in the order in which it returns them.

    Not the input of the first layer, which is the embedding: the layers add to it in place after vLLM has noted it.
    """
    return tuple(sorted({each for each in needs.hidden_states if each != "final" and each != 0}))


def ask_for_states(model: Any, needs: Needs) -> bool:
    """Have vLLM's target return the states between layers that are wanted. False: none are. Raises Refusal."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    wanted = boundaries(needs)
    if not wanted:
        return False
    if not supports_eagle3(model):
        reason = f"vLLM's {type(model).__name__} does not give out the hidden states between its layers"
        raise Refusal(reason, "a target that vLLM runs with EAGLE-3, or a proposer that reads final states only")
    model.set_aux_hidden_state_layers(wanted)
    return True
