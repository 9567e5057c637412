"""A module's tensors under our names, experts joined as transformers computes with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from specdec.sdk import Services
from specdec.sdk.model_proposer import Weights

from .checkpoint import MtpSpec

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def open_weights(spec: MtpSpec, services: Services, wanted: Collection[str]) -> Weights:
    """Read the module, and nothing else of the checkpoint. `wanted`: the names that the network has places for.

    Raises CheckpointError SD-E146.
    """
    directory = spec.checkpoint.directory
    stored = services.load_tensors(directory, spec.layout.prefixes(spec.index))
    renames = spec.layout.renames(spec.index)
    ours = {_our_name(name, renames): tensor for name, tensor in stored.items()}
    joined = _joined_experts(ours, wanted)
    weights = Weights({_in_router(name, wanted): tensor for name, tensor in joined.items()}, directory)
    weights.drop(*spec.layout.further_modules(), "*rotary_emb.inv_freq", "verifier_*")
    return weights


def _our_name(stored: str, renames: Mapping[str, str]) -> str:
    published = next((each for each in renames if stored.startswith(each)), None)
    return stored if published is None else renames[published] + stored.removeprefix(published)


def _joined_experts(tensors: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Experts stored one by one, as published, joined where `wanted` has the joined names; elsewhere as they are.

    Of E experts of inner width m on states of width H: gate_up_proj [E, 2m, H], the gate first; down_proj [E, H, m].
    A set that is not complete stays as it is, to be reported as missing.
    """
    found = {name: match for name in tensors if (match := _EXPERT.fullmatch(name))}
    joined = {name: tensor for name, tensor in tensors.items() if name not in found}
    for stem in sorted({match[1] for match in found.values()}):
        own = {(int(match[2]), match[3]): tensors[name] for name, match in found.items() if match[1] == stem}
        count = 1 + max(expert for expert, _ in own)
        if f"{stem}.gate_up_proj" in wanted and len(own) == 3 * count:
            pairs = [torch.cat([own[expert, "gate_proj"], own[expert, "up_proj"]]) for expert in range(count)]
            joined[f"{stem}.gate_up_proj"] = torch.stack(pairs)
            joined[f"{stem}.down_proj"] = torch.stack([own[expert, "down_proj"] for expert in range(count)])
        else:
            joined |= {name: tensors[name] for name, match in found.items() if match[1] == stem}
    return joined


def _in_router(name: str, wanted: Collection[str]) -> str:
    """Some publishers keep beside the router what transformers keeps in it."""
    inside = name.replace(".mlp.", ".mlp.gate.", 1)
    return inside if name not in wanted and inside in wanted else name
