"""A transformers model as the engine's target: its own modelling code, its own attention, its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.core.host import ForwardInput, HiddenStates, TargetOutput

from .call import Call


class GenerateTarget:
    """Serves one call of `generate` at a time; the model is touched only while it does."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._chooses_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._call: Call
        self._states: HiddenStates
        self.last_logits: Tensor  # [R, V] float32 of the last pass, before the processors
        self.last_scores: Tensor  # [R, V] float32, after them

    @contextmanager
    def serving(self, call: Call, hidden_states: tuple[int | Literal["final"], ...]) -> Iterator[None]:
        """Run passes over this call's text and cache, and keep these hidden states meanwhile."""
        self._call = call
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self._states = HiddenStates(self.model, hidden_states, num_layers)
        try:
            yield
        finally:
            self._states.remove()

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """One pass over the call's only request. What an earlier pass left behind its start is dropped first."""
        start, num_drafts = int(inputs.positions[0]), len(inputs.logits_rows) - 1
        self.keep(start)
        with torch.no_grad():
            output = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                past_key_values=self._call.cache,
                use_cache=True,
                **({"logits_to_keep": inputs.logits_rows} if self._chooses_rows else {}),
            )
        logits = output.logits[0] if self._chooses_rows else output.logits[0, inputs.logits_rows]
        self.last_logits = logits.to(torch.float32)
        length = start + len(inputs.token_ids) - num_drafts
        self._call.write(length, inputs.token_ids[len(inputs.token_ids) - num_drafts :].tolist())
        self.last_scores = self._processed(length)
        return TargetOutput(self.last_scores, self._states.take() if self._states.wanted else None)

    def keep(self, length: int) -> None:
        """Make the cache end after this many tokens."""
        surplus = self._call.cache.get_seq_length() - length
        if surplus > 0:
            self._call.cache.crop(-surplus)

    def _processed(self, length: int) -> Tensor:
        """Row i follows `length` tokens and the first i drafts, and is processed as plain decoding would there."""
        call = self._call
        rows = self.last_logits.clone()  # processors may write
        return torch.cat([call.processors(call.upto(length + i), row[None]) for i, row in enumerate(rows)])
