"""Modules with a state (convolutions, state spaces, linear attention), run request by request in a ragged batch.

They are found in a first pass, by what they store in transformers' cache layers: nothing is read from their names.
Each of them is shown a cache layer that holds the states of the requests at hand, in the form of that class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin, get_layer_types_and_kwargs

from specdec.sdk.errors import UnsupportedModelError

from ..cache.state_store import EvenPass, Group, StateLayout, StatePass, StateTensor
from .few_tokens import Rule, for_few_tokens

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_INERT = {"position_ids", "cache_position"}  # tensors that a recurrence does not read
_CHECKED, _INTERRUPTED = 7, 4  # inputs of a module's check, and after how many of them it is interrupted
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}  # of a recurrence computed otherwise

Forward = Callable[..., Any]


def state_layers(config: Any) -> dict[int, LinearAttentionCacheLayerMixin]:
    """Layers that keep a state, or nothing, by number: as transformers' own cache for this configuration has them."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # a configuration that transformers makes no such cache of
        return {}
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)}


_NOTHING = {"mlp", "moe"}


def storing_nothing(config: Any) -> set[int]:
    """Layers that transformers' cache has a place for and that store nothing there."""
    try:
        types = get_layer_types_and_kwargs(config)[0]
    except Exception:  # as above
        return set()
    return {i for i, layer_type in enumerate(types) if layer_type in _NOTHING}


class Mixer:
    """One such module, and the lane in which it is shown states."""

    def __init__(self, module: nn.Module, argument: str, lane: LinearAttentionCacheLayerMixin) -> None:
        """argument: by which it is given a cache. lane: an empty cache layer of its own."""
        self.module = module
        self.layout = StateLayout((), 0, torch.float32)  # known after its first call
        self.by_token = False  # whether it goes on from a state for one token only
        self._inner: Forward = module.forward
        self._argument = argument
        self._names = list(inspect.signature(module.forward).parameters)
        self._lane = lane
        self._cache = Cache(layers=[lane] * (vars(module)["layer_idx"] + 1))
        self.others: dict[str, Any] = {}  # arguments of its first call

    @property
    def layer(self) -> int:
        """Its number."""
        number: int = vars(self.module)["layer_idx"]
        return number

    def bound(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The hidden states [1, N, H] of a call, and its other arguments that a part of them may be given too."""
        given = dict(zip(self._names, args, strict=False)) | dict(named)
        hidden: Tensor = given.pop("hidden_states")
        given.pop(self._argument, None)
        return hidden, {name: value for name, value in given.items() if name not in _INERT}

    def record(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """A call over one new text. What it stores becomes the layout."""
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
        return output

    def advance(self, given: Tensor, states: Sequence[Tensor], others: Mapping[str, Any], *, is_fresh: bool) -> Tensor:
        """Outputs [g, n, H] of inputs [g, n, H]; `states`, [g, ...] each, are those after them then."""
        if self.by_token and not is_fresh and given.shape[1] > 1:
            each = [self.advance(one, states, others, is_fresh=False) for one in torch.split(given, 1, dim=1)]
            return torch.cat(each, dim=1)
        self._show(states, is_fresh)
        output: Tensor = self._inner(given, **others, **{self._argument: self._cache})
        for layout, state in zip(self.layout.tensors, states, strict=True):
            stored = self._of_kind(layout)[layout.index]
            if stored is not state:
                state.copy_(stored)
        return output

    def exchange(self, kernels: Mapping[str, Rule]) -> None:
        """Compute few tokens in the form that is fastest for them, if that gives the same."""
        exchanged, inner = for_few_tokens(self.module, kernels), self._inner
        if exchanged is None:
            return
        before = self.sample()
        self._inner = exchanged
        if not _agree(self.sample(), before):
            self._inner = inner

    @torch.inference_mode()
    def sample(self, interrupted: int | None = None) -> Tensor:
        """Outputs of some inputs; interrupted: after how many of them it goes on from its state."""
        device = next(self.module.parameters()).device
        given = torch.randn(1, _CHECKED, self.layout.input_size, generator=torch.Generator().manual_seed(0))
        states, parts = (
            self.new_states(1, device),
            torch.split(given.to(device, self.layout.dtype), interrupted or _CHECKED, 1),
        )
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


class Mixers:
    """All modules of a model that keep a state. They compute a pass as `serving` says; None: as one new text."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self._mixers = mixers
        self.serving: StatePass | EvenPass | None = None
        for place, mixer in enumerate(mixers):
            mixer.module.forward = self._forward(place, mixer)

    @property
    def layouts(self) -> list[StateLayout]:
        """Of each module."""
        return [mixer.layout for mixer in self._mixers]

    def exchange(self, kernels: Mapping[str, Rule]) -> None:
        """See `Mixer.exchange`."""
        for mixer in self._mixers:
            mixer.exchange(kernels)

    @contextmanager
    def pass_over(self, states: StatePass | EvenPass) -> Iterator[None]:
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
        output = mixer.advance(given, states, others, is_fresh=group.is_fresh)
        if not isinstance(group.rows, slice):
            for state, new in zip(kept, states, strict=True):
                state[group.rows] = new
        pieces += [output[i, member.num_replayed :] for i, member in enumerate(group.members)]
    for group in passed.drafts:
        given, states = _given(group, hidden, inputs), [state[group.rows].clone() for state in kept]
        inputs[group.rows, : group.length] = given
        pieces += mixer.advance(given, states, others, is_fresh=False).unbind()
    return torch.cat([pieces[i] for i in passed.order])[None] if len(pieces) > 1 else pieces[0][None]


def _even(mixer: Mixer, place: int, passed: EvenPass, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
    """Outputs [1, N, H] of a batch [1, N, H] of equal requests. It may be recorded: no number of a request is read."""
    kept, inputs, rows = passed.store.tensors[place], passed.store.inputs[place], passed.rows
    each, states = hidden.view(len(rows), -1, hidden.shape[-1]), [state[rows] for state in kept]
    committed, drafted = each[:, :1], each[:, 1:]
    given = torch.cat([inputs[rows, : passed.num_replayed], committed], dim=1) if passed.num_replayed else committed
    outputs = [mixer.advance(given, states, others, is_fresh=False)[:, passed.num_replayed :]]
    for state, new in zip(kept, states, strict=True):
        state[rows] = new
    if passed.num_drafts:
        inputs[rows, : passed.num_drafts] = drafted
        outputs.append(mixer.advance(drafted, states, others, is_fresh=False))
    return torch.cat(outputs, dim=1).reshape(hidden.shape)


def _given(group: Group, hidden: Tensor, inputs: Tensor) -> Tensor:
    """What the members of a group read: [g, n, H]."""
    first = group.members[0]
    if len(group.members) == 1 and not first.num_replayed:
        return hidden[:, first.first : first.first + first.num_tokens]
    parts = []
    for member in group.members:
        if member.num_replayed:
            parts.append(inputs[member.row, : member.num_replayed])
        parts.append(hidden[0, member.first : member.first + member.num_tokens])
    return torch.cat(parts).view(len(group.members), group.length, -1)


@contextmanager
def recorded(model: nn.Module, config: Any) -> Iterator[list[Mixer]]:
    """The modules that store a state in a pass over one text, in the order in which they are called."""
    layers = state_layers(config)
    found: list[Mixer] = []
    candidates = [_candidate(module, layers) for module in _innermost(model, layers)] if layers else []
    for mixer in candidates:
        mixer.module.forward = _recording(mixer, found)
    try:
        yield found
    finally:
        for mixer in candidates:
            del mixer.module.forward


def _recording(mixer: Mixer, found: list[Mixer]) -> Forward:
    def forward(*args: Any, **named: Any) -> Any:
        output = mixer.record(args, named)
        if mixer.layout.tensors:
            found.append(mixer)
        return output

    return forward


def _innermost(model: nn.Module, layers: Mapping[int, Any]) -> list[nn.Module]:
    """Modules of these layers that take a cache, without those around them."""
    taking = {name: module for name, module in model.named_modules() if _argument(module, layers) is not None}
    return [
        module for name, module in taking.items() if not any(other.startswith(f"{name}.") for other in taking)
    ]  # fmt: skip


def _argument(module: nn.Module, layers: Mapping[int, Any]) -> str | None:
    if vars(module).get("layer_idx") not in layers:
        return None
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names and "hidden_states" in names), None)


def _candidate(module: nn.Module, layers: Mapping[int, LinearAttentionCacheLayerMixin]) -> Mixer:
    argument = _argument(module, layers)
    assert argument is not None
    return Mixer(module, argument, deepcopy(layers[vars(module)["layer_idx"]]))


def made_ragged(model_type: str, found: Sequence[Mixer]) -> Mixers | None:
    """The modules, made to compute ragged batches. None: there are none. Raises UnsupportedModelError SD-E260."""
    checked: dict[type[nn.Module], bool] = {}
    for mixer in found:
        kind = type(mixer.module)
        if kind not in checked:
            checked[kind] = _goes_on_by_token(model_type, mixer)
        mixer.by_token = checked[kind]
    return Mixers(found) if found else None


def _agree(found: Tensor, expected: Tensor) -> bool:
    difference = (found.float() - expected.float()).norm()
    return bool(difference <= _TOLERANCE[expected.dtype] * expected.float().norm())


def _goes_on_by_token(model_type: str, mixer: Mixer) -> bool:
    """Whether a module goes on from a state for one token only. Raises UnsupportedModelError if not even for one."""
    tensors = [name for name, value in mixer.others.items() if isinstance(value, Tensor)]
    if tensors:
        raise _unserved(model_type, mixer, f"it reads tensors besides its hidden states: {', '.join(tensors)}")
    whole = mixer.sample()
    if not isinstance(whole, Tensor) or whole.shape[:2] != (1, _CHECKED):
        raise _unserved(model_type, mixer, "it returns something else than one row for each token")
    for mixer.by_token in (False, True):
        if _agree(mixer.sample(interrupted=_INTERRUPTED), whole):
            return mixer.by_token
    raise _unserved(model_type, mixer, "it does not go on from a state as it does within one text")


def _unserved(model_type: str, mixer: Mixer, reason: str) -> UnsupportedModelError:
    facts = {"model_type": model_type, "layer": type(mixer.module).__name__, "reason": reason}
    return UnsupportedModelError("SD-E260", "a layer of this model keeps a state in a way that is not served", facts)
