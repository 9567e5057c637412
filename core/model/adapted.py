"""Linear layers of the target with something added to their outputs, while drafting runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.sdk.errors import CheckpointError, did_you_mean

from .target import TargetModel

NUM_TOKENS = 2  # of the pass that shows what goes through layers


@dataclass
class AdaptedRows:
    """Which rows of the pass that runs are adapted."""

    chosen: Tensor | None = None  # [M] bool; None: all


class Adapted(nn.Module):
    """A layer and its term of an adapter. The layer itself stays as it is."""

    def __init__(self, layer: nn.Module, term: nn.Module, rows: AdaptedRows) -> None:
        super().__init__()
        self.layer, self.term, self._rows = layer, term, rows

    def forward(self, input: Tensor) -> Tensor:
        """[..., M, in] -> [..., M, out]. Rows that are not adapted are the layer's own."""
        output: Tensor = self.layer(input)
        added: Tensor = self.term(input)
        if self._rows.chosen is not None:
            added = added * self._rows.chosen[:, None]
        return output + added


def adapted_layers(target: TargetModel, adapter: Mapping[str, nn.Module], rows: AdaptedRows) -> dict[str, nn.Module]:
    """The layers that an adapter changes, by their names in the target, each with its term.

    Raises CheckpointError SD-E297 for a name that is no layer which the target runs, and for a term of other sizes.
    """
    known = dict(target.model.named_modules())
    for name in adapter:
        if name not in known:
            raise _misfit(name, "a layer of the target", "none", did_you_mean(name, known))
    seen = _passed_through(target, {known[name] for name in adapter})
    for name, term in adapter.items():
        if known[name] not in seen:
            raise _misfit(name, "a layer that the target runs by its name", type(known[name]).__name__)
        _require_sizes(name, term, *seen[known[name]])
    return {name: Adapted(known[name], term, rows) for name, term in adapter.items()}


def _passed_through(target: TargetModel, layers: set[nn.Module]) -> dict[nn.Module, tuple[Tensor, Tensor]]:
    """What went into each of these layers in one pass of the target, and what came out."""
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    handles = [
        layer.register_forward_hook(lambda module, args, output: seen.__setitem__(module, (args[0], output)))
        for layer in layers
    ]
    try:
        target.dummy_pass(NUM_TOKENS, 1)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _require_sizes(name: str, term: nn.Module, input: Tensor, output: Tensor) -> None:
    expected = f"{input.shape[-1]} inputs, {output.shape[-1]} outputs"
    if input.shape[:-1].numel() != NUM_TOKENS:
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
