"""Modules with a state (convolutions, state spaces, linear attention), run request by request in a ragged batch.

Each of them is shown a cache layer that holds the states of the requests at hand, in the form of that class.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from specdec.sdk.errors import message

from ..cache.state_store import EvenPass, Group, StateLayout, StatePass, StateTensor
from .few_tokens import Rule, for_few_tokens

_INERT = {"position_ids", "cache_position"}  # tensors that a recurrence does not read
NUM_CHECKED = 7  # inputs of a module's check
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of a recurrence computed otherwise

logger = logging.getLogger("specdec")
Forward = Callable[..., Any]


class Mixer:
    """A module that keeps a state, and the lane in which it is shown states."""

    def __init__(self, module: nn.Module, argument: str, lane: LinearAttentionCacheLayerMixin) -> None:
        """argument: by which it is given a cache. lane: an empty cache layer of its own."""
        self.module = module
        self.layout = StateLayout((), 0, torch.float32)  # known after its first call
        self.by_token = False  # whether it goes on from a state for one token only
        self.is_one_form = False  # whether one token and several are computed alike, as plain decoding computes one
        self._wrapped: Forward | None = vars(module).get("forward")  # by somebody else
        self._inner: Forward = module.forward
        self._argument = argument
        self._names = list(inspect.signature(module.forward).parameters)
        self._lane = lane
        self._cache = Cache(layers=[lane] * (vars(module)["layer_idx"] + 1))
        self.others: dict[str, Any] = {}  # arguments of its first call

    def restore(self) -> None:
        """The module's forward is its own again."""
        del self.module.forward
        if self._wrapped is not None:
            self.module.forward = self._wrapped

    @property
    def layer(self) -> int:
        """The number of the layer."""
        number: int = vars(self.module)["layer_idx"]
        return number

    def bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states [1, N, H] of a call, and its other arguments that a part of them may be given too."""
        given = dict(zip(self._names, args, strict=False)) | dict(named)
        hidden: Tensor = given.pop("hidden_states")
        given.pop(self._argument, None)
        return hidden, {name: value for name, value in given.items() if name not in _INERT}

    def watch(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Watch a call over one new text. What it stores becomes the layout."""
        hidden, self.others = self.bound(args, named)
        output = self._inner(hidden, **self.others, **{self._argument: self._cache})
        kinds = {"conv": self._lane.conv_states, "recurrent": self._lane.recurrent_states}
        tensors = tuple(
            StateTensor(kind, index, tuple(state.shape[1:]), state.dtype)  # type: ignore[arg-type]
            for kind, states in kinds.items()
            for index, state in states.items()
            if state is not None
        )
        self.layout = StateLayout(tensors, hidden.shape[-1], hidden.dtype)
        self.is_one_form = all(each.kind == "conv" for each in tensors)
        return output

    def advance(
        self,
        given: Tensor,
        states: Sequence[Tensor],
        others: Mapping[str, Any],
        *,
        is_fresh: bool = False,
        decodes: bool = False,
    ) -> Tensor:
        """Outputs [g, n, H] of inputs [g, n, H]; `states`, [g, ...] each, are those after them then.

        decodes: whether plain decoding computes each of these inputs in a step of its own. Modelling code has another
        form of a recurrence for that, which may compute something else (time steps of Mamba-2 are unbounded in it).
        """
        one_by_one = self.by_token or (decodes and not self.is_one_form)
        if one_by_one and not is_fresh and given.shape[1] > 1:
            each = [self.advance(one, states, others) for one in torch.split(given, 1, dim=1)]
            return torch.cat(each, dim=1)
        self._show(states, is_fresh)
        output: Tensor = self._inner(given, **others, **{self._argument: self._cache})
        for layout, state in zip(self.layout.tensors, states, strict=True):
            stored = self._of_kind(layout)[layout.index]
            if stored is not state:
                state.copy_(stored)
        return output

    def exchange(self, kernels: Mapping[str, Rule]) -> Exception | None:
        """Compute few tokens in the form that is fastest for them, if that gives the same. Returns why it fails."""
        exchanged, inner = for_few_tokens(self.module, kernels), self._inner
        if exchanged is None:
            return None
        before, failure = self.sample(), None
        self._inner = exchanged
        try:
            self.is_one_form = agree(self.sample(), before)
        except Exception as error:  # modelling code calls it in a way that is not known here
            self.is_one_form, failure = False, error
        if not self.is_one_form:
            self._inner = inner
        return failure

    @torch.inference_mode()
    def sample(self, interrupted: int | None = None) -> Tensor:
        """Outputs of some inputs; interrupted: after how many of them it goes on from its state."""
        device = next(self.module.parameters()).device
        given = torch.randn(1, NUM_CHECKED, self.layout.input_size, generator=torch.Generator().manual_seed(0))
        states = self.new_states(1, device)
        parts = torch.split(given.to(device, self.layout.dtype), interrupted or NUM_CHECKED, 1)
        outputs = [self.advance(part, states, self.others, is_fresh=i == 0) for i, part in enumerate(parts)]
        return torch.cat(outputs, dim=1) if interrupted else outputs[0]

    def _show(self, states: Sequence[Tensor], is_fresh: bool) -> None:
        lane = self._lane
        for layout, state in zip(self.layout.tensors, states, strict=True):
            self._of_kind(layout)[layout.index] = state
            lane.has_previous_state[layout.index] = not is_fresh

    def _of_kind(self, layout: StateTensor) -> dict[int, Any]:
        lane = self._lane
        states: dict[int, Any] = lane.conv_states if layout.kind == "conv" else lane.recurrent_states
        return states

    def new_states(self, count: int, device: torch.device) -> list[Tensor]:
        """Room for those of so many requests."""
        return [torch.zeros(count, *each.shape, dtype=each.dtype, device=device) for each in self.layout.tensors]


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether outputs of one recurrence, computed in two forms, are the same."""
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().norm())


class Mixers:
    """All modules of a model that keep a state. They compute a pass as `serving` says; None: as one new text."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self.each = mixers
        self.serving: StatePass | None = None

    def install(self) -> None:
        """Make the modules compute ragged batches from here on."""
        for place, mixer in enumerate(self.each):
            mixer.module.forward = self._forward(place, mixer)

    def remove(self) -> None:
        """Make the modules compute what they did before."""
        for mixer in self.each:
            mixer.restore()

    @property
    def layouts(self) -> list[StateLayout]:
        """The layout of each module's state."""
        return [mixer.layout for mixer in self.each]

    def exchange(self, kernels: Mapping[str, Rule]) -> None:
        """Exchange operators as `Mixer.exchange` does. Warns, SD-W307, for each class of modules that a form cannot be
        run for.
        """
        failures = {type(mixer.module).__name__: mixer.exchange(kernels) for mixer in self.each}
        for name, failure in failures.items():
            if failure is not None:
                facts = {"layer": name, "error": f"{type(failure).__name__}: {failure}"}
                logger.warning("%s", message("SD-W307", "few tokens are computed by modelling code's own form", facts))

    @contextmanager
    def pass_over(self, states: StatePass) -> Iterator[None]:
        """Modules compute this pass, and its states are settled if it ends well."""
        with states.store.passing(states):
            self.serving = states
            try:
                yield
            finally:
                self.serving = None

    def _forward(self, place: int, mixer: Mixer) -> Forward:
        inner = mixer.module.forward

        def forward(*args: Any, **named: Any) -> Any:
            if self.serving is None:
                return inner(*args, **named)
            hidden, others = mixer.bound(args, named)
            if isinstance(self.serving, EvenPass):
                return _even(mixer, place, self.serving, hidden, others)
            return _ragged(mixer, place, self.serving, hidden, others)

        return forward


def _ragged(mixer: Mixer, place: int, passed: StatePass, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
    """Outputs [1, N, H] of a ragged batch [1, N, H]."""
    kept, inputs = passed.store.tensors[place], passed.store.inputs[place]
    pieces: list[Tensor] = []
    for group in passed.kept:
        given, states = _given(group, hidden, inputs), [state[group.rows] for state in kept]
        output = mixer.advance(given, states, others, is_fresh=group.is_fresh, decodes=group.decodes)
        if not isinstance(group.rows, slice):
            for state, new in zip(kept, states, strict=True):
                state[group.rows] = new
        pieces += [output[i, member.num_reread :] for i, member in enumerate(group.members)]
    for group in passed.drafts:
        given, states = _given(group, hidden, inputs), [state[group.rows].clone() for state in kept]
        inputs[group.rows, : group.length] = given
        pieces += mixer.advance(given, states, others, decodes=True).unbind()
    return torch.cat([pieces[i] for i in passed.order])[None] if len(pieces) > 1 else pieces[0][None]


def _even(mixer: Mixer, place: int, passed: EvenPass, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
    """Outputs [1, N, H] of a batch [1, N, H] of equal requests. It may be captured: no number of a request is read."""
    kept, inputs, rows = passed.store.tensors[place], passed.store.inputs[place], passed.rows
    each, states = hidden.view(len(rows), -1, hidden.shape[-1]), [state[rows] for state in kept]
    committed, drafted = each[:, :1], each[:, 1:]
    given = torch.cat([inputs[rows, : passed.num_reread], committed], dim=1) if passed.num_reread else committed
    output = mixer.advance(given, states, others, decodes=passed.num_reread > 0)
    outputs = [output[:, passed.num_reread :]]
    for state, new in zip(kept, states, strict=True):
        state[rows] = new
    if passed.num_drafts:
        inputs[rows, : passed.num_drafts] = drafted
        outputs.append(mixer.advance(drafted, states, others, decodes=True))
    return torch.cat(outputs, dim=1).reshape(hidden.shape)


def _given(group: Group, hidden: Tensor, inputs: Tensor) -> Tensor:
    """What the members of a group read: [g, n, H]."""
    first = group.members[0]
    if len(group.members) == 1 and not first.num_reread:
        return hidden[:, first.first : first.first + first.num_tokens]
    parts = []
    for member in group.members:
        if member.num_reread:
            parts.append(inputs[member.row, : member.num_reread])
        parts.append(hidden[0, member.first : member.first + member.num_tokens])
    return torch.cat(parts).view(len(group.members), group.length, -1)
