"""The extensions that proposers go without in another engine, and why."""

from __future__ import annotations

import torch

from specdec.sdk.extensions import Grammars, NewWeights, TargetKV, TargetLayers, Trees


def withheld(engine: str, cache: str, device: torch.device) -> dict[str, tuple[str, str]]:
    """The extensions withheld, each with a reason and a way out. engine: its name. cache: what shields the target's
    cache.
    """
    found = {
        each.id: (cache, f"specdec.LLM, or a proposer without {each.__name__}") for each in (TargetKV, TargetLayers)
    }
    found[NewWeights.id] = f"{engine} hands no weights over", "specdec.LLM, or NewWeights() only where it is offered"
    found[Grammars.id] = f"{engine} keeps its grammars to itself", "specdec.LLM, or a proposer without Grammars"
    if device.type != "cpu":
        found[Trees.id] = "this adapter was tried with trees on a CPU alone", "a proposer of chains, or a CPU"
    return found
