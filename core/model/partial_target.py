"""Some of a target's own layers, run between its embedding and its head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import Refusal

from ..kernels.attention_spec import AttentionContext
from .adapted import AdaptedRows, adapted_layers
from .attention import ShapeProbe, attention_arguments
from .hidden_states import decoder_layers
from .target import TargetModel


class PartialTarget:
    """The target with layers left out. It shares every weight, and the target itself stays as it is."""

    def __init__(
        self, target: TargetModel, layers: Collection[int], adapter: Mapping[str, nn.Module] | None = None
    ) -> None:
        """layers: those that run. adapter: what is added to outputs inside them, by name; see `Services.target_layers`.

        Raises Refusal where the model does not do without the others; CheckpointError SD-E297.
        """
        self._target, self._rows = target, AdaptedRows()
        found = decoder_layers(target.model.get_decoder(), target.num_layers, target.model.config)
        path = next(name for name, module in target.model.named_modules() if module is found)
        returns_tuple = isinstance(_output_of(target, found[0]), tuple)
        left_out = {f"{path}.{i}": _without(found[i], returns_tuple) for i in range(len(found)) if i not in layers}
        changed = adapted_layers(target, adapter, self._rows) if adapter else {}
        self._model = with_modules(target.model, changed | left_out)
        self._require(set(layers))

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        context: AttentionContext,
        adapted: Tensor | None = None,
    ) -> Tensor:
        """Logits [R, V] of the rows `logits_rows` [R] of tokens [M] at positions [M].

        adapted: rows that run with the adapter, [M] bool. None means all.
        """
        placed = tokens[None], positions[None], logits_rows
        self._rows.chosen = adapted
        return self._target.run_model(*placed, model=self._model, **attention_arguments(context))

    def _require(self, layers: set[int]) -> None:
        """Seen in one pass over two tokens: these layers attend, and no others."""
        probe, device = ShapeProbe(), self._target.device
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            with torch.inference_mode():
                logits = self(tokens, torch.arange(2, device=device), tokens[:1], probe)
        except Exception as error:  # of modelling code whose layers need each other
            raise Refusal(f"the target's layers do not run without each other: {error}") from error
        if set(probe.layers) != layers or logits.dim() != 2:
            raise Refusal(f"of the target's layers {sorted(layers)}, {sorted(probe.layers)} attend when they run alone")


def with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of a module that shares everything with it but the modules at these dotted paths."""
    twin = copy(module)
    vars(twin)["_modules"] = dict(vars(module)["_modules"])
    forward = vars(module).get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        twin.forward = MethodType(forward.__func__, twin)
    below: dict[str, dict[str, nn.Module]] = {}
    for path, other in replaced.items():
        name, _, rest = path.partition(".")
        below.setdefault(name, {})[rest] = other
    for name, paths in below.items():
        whole = paths.get("")
        setattr(twin, name, with_modules(module.get_submodule(name), paths) if whole is None else whole)
    return twin


def _without(layer: nn.Module, returns_tuple: bool) -> nn.Module:
    """A layer that hands its input on; what models read of layers besides is that of the given one."""

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states,) if returns_tuple else hidden_states

    skipped = copy(layer)
    skipped.forward = forward
    return skipped


def _output_of(target: TargetModel, layer: nn.Module) -> Any:
    found: list[Any] = []
    handle = layer.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        target.dummy_pass(2, 1)
    finally:
        handle.remove()
    return found[0]
