"""A module's tensors under our names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from specdec.sdk import Services
from specdec.sdk.model_proposer import Weights

from .checkpoint import MtpSpec


def open_weights(spec: MtpSpec, index: int, services: Services, wanted: Collection[str]) -> Weights:
    """Read one module, and nothing else of the checkpoint. `wanted`: the names that the network has places for.

    Raises CheckpointError SD-E146.
    """
    directory = spec.checkpoint.directory
    stored = services.load_tensors(directory, spec.layout.prefixes(index))
    renames = spec.layout.renames(index)
    ours = {_our_name(name, renames): tensor for name, tensor in stored.items()}
    weights = Weights({_in_router(name, wanted): tensor for name, tensor in ours.items()}, directory)
    weights.drop(*spec.layout.further_modules(), "*rotary_emb.inv_freq", "verifier_*")
    return weights


def _our_name(stored: str, renames: Mapping[str, str]) -> str:
    published = next((each for each in renames if stored.startswith(each)), None)
    return stored if published is None else renames[published] + stored.removeprefix(published)


def _in_router(name: str, wanted: Collection[str]) -> str:
    """Move what some publishers keep beside the router to where transformers keeps it."""
    inside = name.replace(".mlp.", ".mlp.gate.", 1)
    return inside if name not in wanted and inside in wanted else name
