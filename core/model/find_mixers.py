"""Which modules of a model keep a state, and whether they can be run request by request.

They are found in a first pass, by what they store in transformers' cache layers: nothing is read from their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from specdec.sdk.errors import UnsupportedModelError

from .mixers import NUM_CHECKED, Forward, Mixer, Mixers, agree
from .model_class import no_interface
from .model_support import state_layers, storing_nothing

_CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")
_INTERRUPTED = 4  # inputs of a module's check after which it is interrupted


@contextmanager
def watched_mixers(model: nn.Module, config: Any) -> Iterator[list[Mixer]]:
    """The modules that store a state in a pass over one text, in the order in which they are called."""
    layers = state_layers(config)
    found: list[Mixer] = []
    candidates = _candidates(model, layers)
    for mixer in candidates:
        mixer.module.forward = _watching(mixer, found)
    try:
        yield found
    finally:
        for mixer in candidates:
            mixer.restore()


def _watching(mixer: Mixer, found: list[Mixer]) -> Forward:
    def forward(*args: Any, **named: Any) -> Any:
        output = mixer.watch(args, named)
        if mixer.layout.tensors:
            found.append(mixer)
        return output

    return forward


def _candidates(model: nn.Module, layers: Mapping[int, LinearAttentionCacheLayerMixin]) -> list[Mixer]:
    """Modules of these layers that take a cache, without those around them."""
    taking: dict[str, Mixer] = {}
    for name, module in model.named_modules():
        argument = _argument(module, layers)
        if argument is not None:
            taking[name] = Mixer(module, argument, deepcopy(layers[vars(module)["layer_idx"]]))
    return [mixer for name, mixer in taking.items() if not any(other.startswith(f"{name}.") for other in taking)]


def _argument(module: nn.Module, layers: Mapping[int, Any]) -> str | None:
    if vars(module).get("layer_idx") not in layers:
        return None
    names = inspect.signature(module.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in names and "hidden_states" in names), None)


def mixers_in(model: nn.Module, config: Any, run: Callable[[], object]) -> Mixers | None:
    """The modules of a model that transformers runs, which compute ragged batches while they are installed. None: no
    layer keeps a state.

    config: of its text. run: a pass over one new text.
    Raises UnsupportedModelError SD-E144 or SD-E260 if a layer keeps a state that is not found or not served.
    """
    layers = state_layers(config).keys() - storing_nothing(config)
    if not layers:
        return None
    try:
        with torch.inference_mode(), watched_mixers(model, config) as found:
            run()
    except Exception as error:  # modelling code that expects a cache of its own
        raise no_interface(config, f"{type(error).__name__}: {error}") from error
    missing = layers - {mixer.layer for mixer in found}
    if missing:
        raise no_interface(config, f"layers {sorted(missing)} keep a state outside of transformers' cache")
    return checked_mixers(config.model_type, found)


def checked_mixers(model_type: str, found: Sequence[Mixer]) -> Mixers | None:
    """The modules, each known to go on from a state. None: there are none. Raises UnsupportedModelError SD-E260."""
    checked: dict[type[nn.Module], bool] = {}
    for mixer in found:
        kind = type(mixer.module)
        if kind not in checked:
            checked[kind] = _goes_on_by_token(model_type, mixer)
        mixer.by_token = checked[kind]
    return Mixers(found) if found else None


def _goes_on_by_token(model_type: str, mixer: Mixer) -> bool:
    """Whether a module goes on from a state for one token only. Raises UnsupportedModelError if not even for one."""
    tensors = [name for name, value in mixer.others.items() if isinstance(value, Tensor)]
    if tensors:
        raise _unserved(model_type, mixer, f"it reads tensors besides its hidden states: {', '.join(tensors)}")
    whole = mixer.sample()
    if not isinstance(whole, Tensor) or whole.shape[:2] != (1, NUM_CHECKED):
        raise _unserved(model_type, mixer, "it returns something else than one row for each token")
    for mixer.by_token in (False, True):
        if agree(mixer.sample(interrupted=_INTERRUPTED), whole):
            return mixer.by_token
    raise _unserved(model_type, mixer, "it does not go on from a state as it does within one text")


def _unserved(model_type: str, mixer: Mixer, reason: str) -> UnsupportedModelError:
    facts = {"model_type": model_type, "layer": type(mixer.module).__name__, "reason": reason}
    return UnsupportedModelError("SD-E260", "a layer of this model keeps a state in a way that is not served", facts)
