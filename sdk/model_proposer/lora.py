"""Adapters of low rank (LoRA, arXiv 2106.09685) for layers of the target, in the files of PEFT."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from torch import Tensor, nn

from ..checkpoint import Checkpoint, lacks
from ..errors import CheckpointError, Refusal
from .weights import linear_of

_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_SERVED = {"use_dora": False, "bias": "none", "lora_bias": False, "fan_in_fan_out": False}
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq")  # beginnings that leave the model itself with other weights


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Whether it is an adapter of PEFT, of whatever kind."""
    return checkpoint.config.get("peft_type") is not None


class LowRank(nn.Module):
    """What LoRA adds to the output of a linear layer: scale * up(down(input))."""

    def __init__(self, down: Tensor, up: Tensor, scale: float = 1.0) -> None:
        """down: [r, in]. up: [out, r]. The scale becomes a part of it."""
        super().__init__()
        self.down: nn.Linear = linear_of(down)
        self.up: nn.Linear = linear_of(up.float() * scale)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        output: Tensor = self.up(self.down(input))
        return output


@dataclass(frozen=True)
class LowRankPair:
    """The two matrices of one layer."""

    down: str  # name of the tensor [r, in]
    up: str  # name of the tensor [out, r]
    scale: float


def read_adapter(checkpoint: Checkpoint) -> dict[str, LowRankPair]:
    """What an adapter of LoRA has for each layer, from its configuration and the shapes of its tensors.

    The layers have the names of the target's modelling code.

    Raises Refusal for adapters of another kind; CheckpointError: SD-E146, SD-E170 .. SD-E172 for a lone matrix or none
    at all, SD-E174 for other tensors, SD-E298 for matrices of another rank than the configuration's.
    """
    _refuse_others(checkpoint)
    rank, alpha = checkpoint.get("r", int), checkpoint.get("lora_alpha", (int, float))
    ranks, alphas = checkpoint.get("rank_pattern", dict, {}), checkpoint.get("alpha_pattern", dict, {})
    divides_by_root = checkpoint.get("use_rslora", bool, False)
    found = {}
    for layer, (down, up) in _paired(checkpoint).items():
        own_rank, own_alpha = _of(ranks, layer, rank), _of(alphas, layer, alpha)
        _require_rank(checkpoint, layer, own_rank, checkpoint.shapes[down], checkpoint.shapes[up])
        scale = own_alpha / (sqrt(own_rank) if divides_by_root else own_rank)
        found[layer] = LowRankPair(down, up, scale)
    return found


def load_adapter(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> dict[str, LowRank]:
    """An adapter's terms by layer, for `Services.target_layers`. `Services.finish` brings each to the device.

    tensors: the checkpoint's. Raises what `read_adapter` raises.
    """
    pairs = read_adapter(checkpoint)
    return {layer: LowRank(tensors[each.down], tensors[each.up], each.scale) for layer, each in pairs.items()}


def _refuse_others(checkpoint: Checkpoint) -> None:
    kind = checkpoint.get("peft_type", str)
    if kind != "LORA":
        raise Refusal(f"an adapter of kind {kind!r} is not implemented", 'an adapter with peft_type "LORA"')
    for name, served in _SERVED.items():
        found = checkpoint.get(name, type(served), served)
        if found != served:
            raise Refusal(f"an adapter with {name}: {found!r} is not implemented", f"{name}: {served!r}")
    start = checkpoint.config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_THE_MODEL):
        reason = f"an adapter with init_lora_weights: {start!r} belongs to a model with other weights"
        raise Refusal(reason, "the adapter converted to plain LoRA, as PEFT offers on saving")


def _paired(checkpoint: Checkpoint) -> dict[str, tuple[str, str]]:
    """The names of each layer's two tensors."""
    sides: dict[str, dict[str, str]] = {}
    for name in checkpoint.shapes:
        found = _TENSOR.fullmatch(name)
        if found is None:
            facts = {"tensor": name, "checkpoint": checkpoint.directory, "known": "LAYER.lora_A.weight, .lora_B.weight"}
            raise CheckpointError("SD-E174", "the adapter has a tensor that this proposer does not know", facts)
        sides.setdefault(found["layer"].removeprefix(_PREFIX), {})[found["side"]] = name
    lone = [f"{layer}.lora_{side}.weight" for layer, each in sides.items() for side in "AB" if side not in each]
    if lone or not sides:
        raise lacks(checkpoint, ", ".join(lone[:6]) or "LAYER.lora_A.weight")
    return {layer: (each["A"], each["B"]) for layer, each in sides.items()}


def _require_rank(checkpoint: Checkpoint, layer: str, rank: int, down: tuple[int, ...], up: tuple[int, ...]) -> None:
    if (len(down), len(up)) != (2, 2) or not down[0] == up[1] == rank:
        facts = {
            "layer": layer,
            "expected": f"lora_A [{rank}, in], lora_B [out, {rank}]",
            "found": f"lora_A {list(down)}, lora_B {list(up)}",
            "file": checkpoint.config_file,
        }
        raise CheckpointError("SD-E298", "the adapter's matrices have another rank than it says", facts)


def _of(patterns: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """The first entry whose key is the layer's name or its end, as PEFT reads these tables."""
    return next((each for key, each in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", layer)), otherwise)
