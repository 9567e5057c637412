"""A Hydra checkpoint (zankner/Hydra) as one specification, and its tensors under our names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, lacks, require_target

_T = TypeVar("_T")
PREFIX = "prefix_embeding_layer."
"""Of the prefix layer's tensors, as published."""

UNUSED = (f"{PREFIX}embed_tokens.*", "*rotary_emb.inv_freq")
"""The prefix layer is stored as a whole model, whose embedding nothing reads."""

_ARCHITECTURE = "prefix-mlp"
_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_HEAD = re.compile(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class HydraSpec:
    """What the heads are made of."""

    decoder: Mapping[str, Any]  # the prefix layer's configuration under transformers' names
    num_heads: int
    num_layers: int  # of each head
    hidden_size: int
    vocab_size: int
    logit_scale: float  # on the output of the heads

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> HydraSpec:
        """Read config.json and the tensors' shapes. The prefix layer has the target's sizes.

        Raises Refusal for other kinds of Hydra heads and for heads of another target; CheckpointError: SD-E146, SD-E170
        .. SD-E172.
        """
        kind = checkpoint.get("hydra_head_arch", str, _ARCHITECTURE)
        if kind != _ARCHITECTURE or not checkpoint.get("grounded_heads", bool, True):
            grounded = f"grounded_heads: {checkpoint.get('grounded_heads', bool, True)}"
            reason = f"Hydra heads with hydra_head_arch: {kind!r}, {grounded} are not implemented"
            raise Refusal(reason, f'heads with hydra_head_arch "{_ARCHITECTURE}" and grounded_heads true')
        shapes = our_names(checkpoint.shapes)
        head = shapes.get("lm_heads.0.weight")
        if head is None or len(head) != 2:
            raise lacks(checkpoint, "hydra_lm_head.0.1.weight [V, H]")
        require_target(target, vocab_size=head[0], hidden_size=head[1])
        of_target = {name: value for name, value in target.config.items() if name != "layer_types"}
        return cls(
            decoder=of_target | {"model_type": "llama", "num_hidden_layers": 1},
            num_heads=checkpoint.get("hydra_num_heads", int),
            num_layers=checkpoint.get("hydra_num_layers", int, 1),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            logit_scale=checkpoint.logit_scale or 1.0,
        )


def our_names(stored: Mapping[str, _T]) -> dict[str, _T]:
    """The same values by our names. Blocks of a head are counted without the dropout between them."""
    return {_our_name(name): value for name, value in stored.items()}


def _our_name(stored: str) -> str:
    if found := _BLOCK.fullmatch(stored):
        return f"blocks.{found[1]}.{int(found[2]) // 2}.{found[3]}.{found[4]}"
    if found := _HEAD.fullmatch(stored):
        return f"lm_heads.{found[1]}.{found[2]}"
    return stored.replace(f"{PREFIX}layers.0.", "layer.").replace(f"{PREFIX}norm.", "norm.")
