"""Drafting one token after the other, or all in one pass with rows of a mask in the place of tokens not yet known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from ..checkpoint import Checkpoint
from ..types import Draft, StepView
from .autoregressive import AutoregressiveProposer, DraftInputs
from .base import ModelOptions
from .parallel import ParallelProposer

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names under which configurations keep the id of the mask, in the order in which vLLM looks for it."""


def mask_token_id(checkpoint: Checkpoint) -> int | None:
    """The id of the mask that a checkpoint was trained with. None means that it states none.

    Raises CheckpointError SD-E171 for a value that is no integer.
    """
    stated = (checkpoint.get(key, int, None) for key in MASK_KEYS)
    return next((each for each in stated if each is not None), None)


class MaskedOptions(ModelOptions):
    """Options of proposers that may draft in parallel."""

    parallel_drafting: bool | None = Field(
        default=None,
        description="True: all drafts in one pass, by a checkpoint trained for it; None: if it was trained for it",
    )


class MaskedProposer(AutoregressiveProposer, ParallelProposer):
    """Drafts in parallel where the network was trained for it, and one token after the other elsewhere.

    In parallel, K - 1 rows of the mask follow the rows that the step committed. The last committed row gives the first
    draft, and each row of the mask the draft after it (arXiv 2504.18583, 2602.01469). Their keys and values are
    overwritten like those of any row that was drafted.
    """

    Options: type[ModelOptions] = MaskedOptions

    mask_token_id: int | None = None
    """The token of the mask, set in `build`. None means one token after the other."""

    def masked(self, inputs: DraftInputs) -> Tensor:
        """Run rows of the mask. Returns the states [M, S] of all of them.

        `inputs.hidden` repeats each request's last hidden states, where rows are not shifted and some are declared.
        """
        return self.first(inputs)

    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        base = AutoregressiveProposer if self.mask_token_id is None else ParallelProposer
        return base.propose(self, step)

    def block_inputs(self, step: StepView) -> Sequence[Tensor]:
        """Where the rows of the mask go, the states after what was committed, and perhaps the last hidden states."""
        starts = step.kept.next_position + (0 if self.INPUTS_ARE_SHIFTED else 1)
        return step.slots, starts, self._states, *self._last_hidden_of(step.slots)

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """The first token's from the last row of what was committed, the others' from a row of the mask each."""
        slots, starts, states, *hidden = inputs
        states = states[:, None]
        if num_tokens > 1:
            masked = self._masked(num_tokens - 1, slots, starts, *hidden)
            states = torch.cat([states, masked.view(len(slots), num_tokens - 1, -1)], dim=1)
        return self.logits(states.flatten(0, 1)).view(len(slots), num_tokens, -1)

    def _masked(self, num_masks: int, slots: Tensor, starts: Tensor, *hidden: Tensor) -> Tensor:
        """The states [b * num_masks, S] of the rows of the mask from `starts` [b] on."""
        assert self.mask_token_id is not None, "it drafts in parallel"
        cu_queries = torch.arange(len(slots) + 1, device=slots.device) * num_masks
        positions = (starts[:, None] + torch.arange(num_masks, device=slots.device)).flatten()
        return self.masked(
            DraftInputs(
                token_ids=torch.full_like(positions, self.mask_token_id),
                positions=positions,
                hidden=hidden[0].repeat_interleave(num_masks, dim=0) if hidden else None,
                last=torch.arange(len(positions), device=slots.device),
                attention=self._attention(slots, starts, cu_queries),
            )
        )
