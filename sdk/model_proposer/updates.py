"""New weights for draft networks that run.

They are built beside the old ones, as from a checkpoint that has the new tensors, and then copied into their places. So
what was wrong changes nothing, and what compiled or captured a pass goes on with the places that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import NetworkSettings
from ..errors import ConfigError
from .weights import expert_stems

if TYPE_CHECKING:
    from ..services import Services


class UpdatedServices:
    """The engine's services, with other tensors in the place of a checkpoint's."""

    def __init__(self, services: Services, tensors: Mapping[str, Tensor]) -> None:
        self._services, self._tensors = services, tensors
        self._known: set[str] = set()  # names that checkpoints have had

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)

    def load_tensors(self, checkpoint: str | Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
        """Load the tensors with the new ones in their places. Raises ConfigError SD-E228 for one that does not fit."""
        stored = self._services.load_tensors(checkpoint, prefixes)
        self._known |= stored.keys()
        new = {name: tensor.to(stored[name].device) for name, tensor in self._tensors.items() if name in stored}
        require_fit(new, stored)
        return stored | new

    def load_causal_lm(
        self, checkpoint: str | Path, settings: NetworkSettings, tensors: Mapping[str, Tensor] | None = None
    ) -> Any:
        """Load the model with the new tensors in it. Raises ConfigError SD-E228 for one that does not fit."""
        self._known |= self._tensors.keys()
        new = {**(tensors or {}), **self._tensors, **self._experts(checkpoint)}
        return self._services.load_causal_lm(checkpoint, settings, new)

    def _experts(self, checkpoint: str | Path) -> dict[str, Tensor]:
        """Load all experts of layers where one is new: a model that keeps them joined takes them together."""
        layers = tuple(f"{stem}." for stem in expert_stems(self._tensors))
        found = self.load_tensors(checkpoint, layers) if layers else {}
        require_fit({name: each for name, each in self._tensors.items() if name.startswith(layers)}, found)
        return found

    def require_known(self) -> None:
        """Raise ConfigError SD-E228 if no checkpoint that was read has a tensor of some name."""
        unknown = sorted(self._tensors.keys() - self._known)
        if unknown:
            raise misfit(dict.fromkeys(unknown, "no tensor of the checkpoint has this name"))


def require_fit(new: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ConfigError SD-E228 unless each new tensor can stand for the stored one of its name.

    Any floating-point dtype stands for another. What is not finite stands for nothing.
    """
    wrong: dict[str, str] = {}
    for name, tensor in new.items():
        if name not in stored:
            wrong[name] = "no tensor of the checkpoint has this name"
        elif tensor.shape != stored[name].shape:
            wrong[name] = f"expected {list(stored[name].shape)}, found {list(tensor.shape)}"
        elif tensor.is_floating_point() != stored[name].is_floating_point():
            wrong[name] = f"expected {stored[name].dtype}, found {tensor.dtype}"
        elif not bool(torch.isfinite(tensor).all()):
            wrong[name] = "holds a NaN or an infinity"
    if wrong:
        raise misfit(wrong)


def copy_networks(old: Mapping[str, object], new: Mapping[str, object]) -> None:
    """Copy every parameter and buffer of the networks among the attributes of one proposer into those of another.

    Raises ConfigError SD-E229 if they are not made of the same parts. Nothing is copied then.
    """
    places, values = dict(_tensors(old)), dict(_tensors(new))
    differing = sorted(
        name
        for name in places.keys() | values.keys()
        if name not in places or name not in values or _kind(places[name]) != _kind(values[name])
    )
    if differing:
        raise other_parts(differing)
    for name, place in places.items():
        place.copy_(values[name])


def other_parts(differing: Sequence[str]) -> ConfigError:
    """The error for tensors that make another network than the one that runs."""
    facts = {
        "differing": ", ".join(differing[:6]),
        "likely": "a tensor that equalled the target's, which was shared, no longer does, or the other way round",
        "fix": "write a checkpoint with the new tensors, and make a new engine with it",
    }
    return ConfigError("SD-E229", "with the new weights the draft network is made of other parts", facts)


def misfit(wrong: Mapping[str, str]) -> ConfigError:
    """The error for tensors that cannot be taken, with what is wrong with each."""
    facts = dict(list(wrong.items())[:6]) | {"fix": "pass tensors under the names and in the shapes of the checkpoint"}
    return ConfigError("SD-E228", "the new weights do not fit the draft network; nothing was changed", facts)


def _tensors(attributes: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for attribute, network in sorted(attributes.items()):
        if isinstance(network, nn.Module):
            yield from network.named_parameters(attribute, remove_duplicate=False)
            yield from network.named_buffers(attribute, remove_duplicate=False)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout
