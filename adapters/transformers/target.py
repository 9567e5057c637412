"""A transformers model as the engine's target: its own modelling code, its own attention, its own cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from specdec.core.host import Backend, ForwardInput, HiddenStates, Scheduled, StateStore, TargetOutput
from specdec.sdk.errors import UnsupportedModelError

from .call import Call
from .compiled import refuse_compiled
from .grid import Grid
from .refusals import refused
from .row_cache import RowCache, held_length, without_windows
from .states import CACHE_ARGUMENTS, States, new_cache


class OwnPasses(dict[int | Literal["final"], Tensor]):
    """What passes of this thread put here. Others may run the same model meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = get_ident()

    def __setitem__(self, name: int | Literal["final"], states: Tensor) -> None:
        if get_ident() == self._thread:
            super().__setitem__(name, states)


class GenerateTarget:
    """Serves one call of `generate` at a time; the model is touched only while it does."""

    def __init__(
        self, model: Any, num_drafts: int, backend: Backend, *, may_begin_late: bool, reads_states: bool
    ) -> None:
        """num_drafts: the most of a row in a pass. may_begin_late: whether passes may begin behind what a call's cache
        holds. reads_states: whether hidden states are wanted. Raises UnsupportedModelError for layers that keep a state
        another way and for a model without a cache, and ConfigError SD-E198 for compiled layers that have to be
        watched.
        """
        self.model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._may_begin_late = may_begin_late
        self._layers_with_state = States.of(model, num_drafts, backend)
        self._reads_layers = self._layers_with_state is not None or reads_states
        self._refuse_compiled()
        parameters = inspect.signature(model.forward).parameters
        self._chooses_rows = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        argument = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        if argument is None:
            facts = {"class": type(model).__name__, "reason": f"its forward takes none of {', '.join(CACHE_ARGUMENTS)}"}
            raise UnsupportedModelError("SD-E142", "this model cannot be served as a target", facts)
        self._cache_argument = argument
        self.plan: Sequence[Scheduled] = ()  # the shares of the next pass
        self._call: Call
        self._cache: RowCache
        self._states: HiddenStates
        self._computed: int  # of the first text, without drafts: the last pass advanced its states as far

    @property
    def states(self) -> StateStore | None:
        """The states of layers that keep one. None means that no layer does."""
        return self._layers_with_state.store if self._layers_with_state else None

    def open_cache(self, call: Call) -> RowCache:
        """Open a cache that holds as much of the call's own as can be used. It forgets nothing behind a rejected draft.

        Raises RequestError SD-E197 for a batch of which layers keep states.
        """
        given, num_rows = call.given, len(call.texts)
        if self._layers_with_state:
            if num_rows > 1:
                asked = f"a batch of {num_rows}, and layers of this model keep a state of each row"
                raise refused(asked, "one prompt a call, or specdec.LLM")
            return RowCache(new_cache(self.model.config), [0], 0)
        found = without_windows(given) if self._may_begin_late and isinstance(given, DynamicCache) else None
        cache = found or DynamicCache()
        width = held_length(cache)
        for text in call.texts:
            text.num_held = max(width - text.num_padding, 0)
        return RowCache(cache, [text.num_held for text in call.texts], width)

    @contextmanager
    def serving(self, call: Call, cache: RowCache, hidden_states: tuple[int | Literal["final"], ...]) -> Iterator[None]:
        """Run passes over this call's texts and cache, and keep these hidden states meanwhile."""
        self._refuse_compiled()
        num_layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        self._states = HiddenStates(self.model, hidden_states, num_layers)
        self._states.kept = OwnPasses()
        self._call, self._cache = call, cache
        try:
            with self._layers_with_state.serving() if self._layers_with_state else nullcontext():
                yield
        finally:
            self._states.remove()
            del self._call, self._cache, self._states

    def _refuse_compiled(self) -> None:
        if self._reads_layers:
            refuse_compiled(self.model)

    def forward(self, inputs: ForwardInput) -> TargetOutput:
        """Run one pass over the requests that the scheduler planned."""
        shares = self.plan
        self._computed = shares[0].start + shares[0].num_tokens
        layers, passed = self._layers_with_state, inputs.states
        with layers.mixers.pass_over(passed) if layers and passed else nullcontext():
            grid, columns = self._pass_over(shares, inputs.token_ids, inputs.positions)
        hidden = tuple([grid.gather(state) for state in self._states.take()])  # processors may run the model
        scores, logits = [], grid.gather_logits(columns).to(torch.float32)
        for row, (first, stop) in zip(grid.rows, grid.bounds, strict=True):
            drafts = inputs.token_ids[inputs.logits_rows[first + 1 : stop]].tolist()
            scores.append(self._call.texts[row].process(self._call.processors, logits[first:stop], drafts))
        return TargetOutput(torch.cat(scores), hidden)

    def _pass_over(self, shares: Sequence[Scheduled], token_ids: Tensor, positions: Tensor) -> tuple[Grid, Tensor]:
        """Logits [B, columns that are read, V]. What an earlier pass rejected is dropped first."""
        held = [text.num_computed for text in self._call.texts]
        self._cache.keep(held)
        rows = [self._call.row_of(share.request) for share in shares]
        grid = Grid(shares, rows, held, self.device)
        with torch.no_grad():
            output = self.model(input_ids=grid.spread(token_ids), use_cache=True, **self._arguments(grid, positions))
        self._cache.grow(grid.width, grid.padding)
        return grid, output.logits if self._chooses_rows else output.logits[:, grid.newest : grid.last_read + 1]

    def _arguments(self, grid: Grid, positions: Tensor) -> dict[str, Any]:
        """Arguments of the pass that not all classes take, or name alike."""
        arguments: dict[str, Any] = {self._cache_argument: self._cache.cache}
        mask = grid.mask()
        if mask is not None:
            arguments["attention_mask"] = mask
        if self._takes_positions:
            arguments["position_ids"] = grid.spread(positions)
        if self._chooses_rows:
            arguments["logits_to_keep"] = torch.arange(grid.newest, grid.last_read + 1, device=self.device)
        return arguments

    def end(self) -> None:
        """Make the cache that of the texts that `generate` returns, slot by slot; their last token is not in it."""
        call = self._call
        width = call.num_inputs + call.num_output_tokens - 1
        if call.keeps_cache:
            self._compute_ends(width)
        self._cache.lay_out([text.num_padding for text in call.texts], width)
        if self._layers_with_state:
            self._layers_with_state.hand_over(self._cache.cache, width - call.texts[0].num_padding - self._computed)

    def _compute_ends(self, width: int) -> None:
        """Texts that ended before others have their last token in the cache, too, and the padding behind it."""
        shares, token_ids, positions = [], [], []
        for text in self._call.texts:
            start, stop = text.num_computed, width - text.num_padding
            if start < stop:
                shares.append(Scheduled(text.request, start, 1, stop - start - 1, samples=False))
                token_ids.append(text.upto(stop)[0, text.num_padding + start :])
                positions.append(torch.arange(start, stop))
        if shares:
            self._pass_over(shares, torch.cat(token_ids).to(self.device), torch.cat(positions).to(self.device))
