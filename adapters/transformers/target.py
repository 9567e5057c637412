"""A transformers model as the engine's target: its own modelling code, its own attention, its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.core.host import Backend, ForwardInput, HiddenStates, StateStore, TargetOutput

from .call import Call
from .states import CACHE_ARGUMENTS, States, crop, new_cache


class GenerateTarget:
    """Serves one call of `generate` at a time; the model is touched only while it does."""

    def __init__(self, model: Any, num_drafts: int, backend: Backend) -> None:
        """num_drafts: the most of a pass. Raises UnsupportedModelError for layers that keep a state another way."""
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._layers_with_state = States.of(model, num_drafts, backend)
        parameters = inspect.signature(model.forward).parameters
        self._chooses_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_argument = next(name for name in CACHE_ARGUMENTS if name in parameters)
        self._call: Call
        self._states: HiddenStates
        self._length: int  # of the text without drafts, in the last pass
        self.last_logits: Tensor  # [R, V] float32 of the last pass, before the processors
        self.last_scores: Tensor  # [R, V] float32, after them

    @property
    def states(self) -> StateStore | None:
        """Of layers that keep one. None: no layer does."""
        return self._layers_with_state.store if self._layers_with_state else None

    def new_cache(self) -> DynamicCache:
        """An empty one of transformers, which forgets nothing that a rejected draft overwrites."""
        return new_cache(self.model.config) if self._layers_with_state else DynamicCache()

    @contextmanager
    def serving(self, call: Call, hidden_states: tuple[int | Literal["final"], ...]) -> Iterator[None]:
        """Run passes over this call's text and cache, and keep these hidden states meanwhile."""
        self._call = call
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self._states = HiddenStates(self.model, hidden_states, num_layers)
        try:
            with self._layers_with_state.serving() if self._layers_with_state else nullcontext():
                yield
        finally:
            self._states.remove()

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """One pass over the call's only request. What an earlier pass left behind its start is dropped first."""
        start, num_drafts = int(inputs.positions[0]), len(inputs.logits_rows) - 1
        crop(self._call.cache, start)
        layers, passed = self._layers_with_state, inputs.states
        with torch.no_grad(), layers.pass_over(passed) if layers and passed else nullcontext():
            output = self.model(input_ids=inputs.token_ids[None], use_cache=True, **self._arguments(inputs))
        logits = output.logits[0] if self._chooses_rows else output.logits[0, inputs.logits_rows]
        self.last_logits = logits.to(torch.float32)
        self._length = start + len(inputs.token_ids) - num_drafts
        self._call.write(self._length, inputs.token_ids[len(inputs.token_ids) - num_drafts :].tolist())
        self.last_scores = self._processed(self._length)
        return TargetOutput(self.last_scores, self._states.take() if self._states.wanted else None)

    def _arguments(self, inputs: ForwardInput) -> dict[str, Any]:
        """Those that only some classes take, or that have several names."""
        arguments: dict[str, Any] = {self._cache_argument: self._call.cache}
        if self._takes_positions:
            arguments["position_ids"] = inputs.positions[None]
        if self._chooses_rows:
            arguments["logits_to_keep"] = inputs.logits_rows
        return arguments

    def end(self, length: int) -> None:
        """Make the cache that of a text whose first `length` tokens were computed."""
        crop(self._call.cache, length)
        if self._layers_with_state:
            self._layers_with_state.hand_over(self._call.cache, length - self._length)

    def _processed(self, length: int) -> Tensor:
        """Row i follows `length` tokens and the first i drafts, and is processed as plain decoding would there."""
        call = self._call
        rows = self.last_logits.clone()  # processors may write
        return torch.cat([call.processors(call.upto(length + i), row[None]) for i, row in enumerate(rows)])
