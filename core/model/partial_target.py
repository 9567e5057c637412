"""Some of a target's own layers, run between its embedding and its head, some of them with an adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk.errors import CheckpointError, Refusal, did_you_mean

from ..kernels.attention_spec import AttentionContext
from .attention import ShapeProbe, attention_arguments
from .hidden_states import decoder_layers, passed_through
from .target import TargetModel

_NUM_TOKENS = 2  # of the pass that shows what goes through layers


class _Adapted(nn.Module):
    """A layer and its term of an adapter. The layer itself stays as it is."""

    def __init__(self, layer: nn.Module, term: nn.Module, of: PartialTarget) -> None:
        super().__init__()
        self.layer, self.term, self._of = layer, term, of

    def forward(self, input: Tensor) -> Tensor:
        """[..., M, in] -> [..., M, out]. Rows that are not adapted are the layer's own."""
        output: Tensor = self.layer(input)
        added: Tensor = self.term(input)
        if self._of.adapted is not None:
            added = added * self._of.adapted[:, None]
        return output + added


class PartialTarget:
    """The target with layers left out. It shares every weight, and the target itself stays as it is."""

    def __init__(
        self, target: TargetModel, layers: Collection[int], adapter: Mapping[str, nn.Module] | None = None
    ) -> None:
        """layers: those that run. adapter: what is added to outputs inside them, by name; see `Services.target_layers`.

        Raises Refusal where the model does not do without the others; CheckpointError SD-E297.
        """
        self._target = target
        self.adapted: Tensor | None = None  # [M] bool, rows of the pass that runs; None: all
        found = decoder_layers(target.model.get_decoder(), target.num_layers, target.model.config)
        path = next(name for name, module in target.model.named_modules() if module is found)
        _, output = passed_through(found[:1], partial(target.dummy_pass, _NUM_TOKENS, 1))[found[0]]
        returns_tuple = isinstance(output, tuple)
        left_out = {f"{path}.{i}": _without(found[i], returns_tuple) for i in range(len(found)) if i not in layers}
        changed = self._adapted_layers(adapter) if adapter else {}
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
        self.adapted = adapted
        return self._target.run_model(*placed, model=self._model, **attention_arguments(context))

    def _adapted_layers(self, adapter: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """The layers that an adapter changes, by their names in the target, each with its term.

        Raises CheckpointError SD-E297 for a name that is no layer which the target runs, and for a term of other sizes.
        """
        known = dict(self._target.model.named_modules())
        for name in adapter:
            if name not in known:
                raise _misfit(name, "a layer of the target", "none", did_you_mean(name, known))
        seen = passed_through({known[name] for name in adapter}, partial(self._target.dummy_pass, _NUM_TOKENS, 1))
        for name, term in adapter.items():
            args, output = seen.get(known[name], ((), None))
            if not args or not isinstance(output, Tensor):
                expected = "a layer that the target runs by its name, on one tensor"
                raise _misfit(name, expected, type(known[name]).__name__)
            _require_sizes(name, term, args[0], output)
        return {name: _Adapted(known[name], term, self) for name, term in adapter.items()}

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


def _require_sizes(name: str, term: nn.Module, input: Tensor, output: Tensor) -> None:
    expected = f"{input.shape[-1]} inputs, {output.shape[-1]} outputs"
    if input.shape[:-1].numel() != _NUM_TOKENS:
        raise _misfit(name, "a layer that runs every row of a pass", "one that runs some of them")
    try:
        with torch.inference_mode():
            found = term(torch.zeros_like(input))
    except RuntimeError as error:  # of matrices that do not fit each other
        raise _misfit(name, expected, str(error).splitlines()[0]) from error
    if found.shape != output.shape:
        raise _misfit(name, expected, f"{found.shape[-1]} outputs")


def _misfit(name: str, expected: str, found: str, suggestion: str | None = None) -> CheckpointError:
    facts = {"layer": name, "expected": expected, "found": found}
    facts |= {"did you mean": suggestion} if suggestion else {}
    facts["fix"] = "an adapter that was trained for this target"
    return CheckpointError("SD-E297", "the adapter does not fit the target", facts)
