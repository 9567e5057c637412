"""Drafting one token after the other from what the target's cache holds already."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..services import Services
from ..types import Draft, StepView, TargetInfo
from .base import ModelProposer
from .drafts import DraftChain
from .sampling import DrawRule, of_chosen


class CachedTargetProposer(ModelProposer):
    """One pass per draft token, and none over what the step committed.

    For networks that keep nothing between steps. What they know of the text they read of the target: its keys and
    values (`Services.target_kv`), its layers (`Services.target_layers`), or the last hidden states alone.
    """

    @abstractmethod
    def advance(
        self, index: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *states: Tensor
    ) -> tuple[Tensor, ...]:
        """Run one token of each request. Returns the logits [b, D] of the next one, then the new states.

        It may be captured on a device (see `Services.capture`).

        index: how many tokens were drafted before.
        slots: the slot of each request, [b].
        lengths: positions that the target has computed, [b]. The newest token stands at that position.
        token_ids: the newest token, then the one drafted last, [b].
        states: `first_states` of these requests, then what the pass before returned.
        """

    def first_states(self, step: StepView) -> Sequence[Tensor]:
        """What the first pass reads besides: tensors [B, ...] with one row per request. None by default."""
        return ()

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Bind as `ModelProposer` does, and make the chain that drafts."""
        super().bind(target, services)
        self._chain = DraftChain(self, self._inputs, self._drawn)

    @torch.inference_mode()
    def propose(self, step: StepView) -> Draft:
        """Draft for every request with a budget."""
        return self._chain.draft(step)

    def _inputs(self, step: StepView, chosen: Tensor | None) -> Sequence[Tensor]:
        inputs = [step.slots, step.kept.next_position, step.newest_token, *self.first_states(step)]
        return [of_chosen(each, chosen) for each in inputs]

    def _drawn(
        self, rule: DrawRule, num_tokens: int, slots: Tensor, lengths: Tensor, token_ids: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        """Tokens drawn one after the other. given: states, then numbers. See `DraftChain`."""
        num_states = len(given) - (rule.form != "one_hot")
        states: Sequence[Tensor] = given[:num_states]
        drawing = rule.drawing(given[num_states:], num_tokens)
        for index in range(num_tokens):
            logits, *states = self.advance(index, slots, lengths, token_ids, *states)
            token_ids = drawing.draw(logits)
        return drawing.result()
