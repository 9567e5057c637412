"""The configuration of the draft layers: gaps filled as the format means them, windows and causality per layer."""

from __future__ import annotations

from typing import Any

from specdec.sdk.checkpoint import Checkpoint, unusable
from specdec.sdk.extensions import AttentionMode
from specdec.sdk.model_proposer.kv_shape import layers_config

from .fields import anywhere
from .variants import Member

USUAL_MODEL_TYPE = "qwen3"
USUAL_ROPE_THETA = 1_000_000.0  # of the published models; transformers' own default differs
_MUSE = "muse_glimmer_assistant"  # Qwen3's layers under a name of their own
_SEE_BOTH_WAYS = (Member.DFLASH2, Member.LILICORR)
_SLIDING, _FULL = "sliding_attention", "full_attention"
_REPLACED = frozenset({"dflash_config", "is_causal"})


def decoder_config(
    checkpoint: Checkpoint, prefix: str, member: Member
) -> tuple[dict[str, Any], tuple[AttentionMode, ...]]:
    """The layers' configuration for transformers, and how each layer attends.

    `prefix` is where config.json has it: "" or "transformer_layer_config.". Raises CheckpointError SD-E170, SD-E171.
    """
    stated = layers_config(checkpoint, prefix, USUAL_ROPE_THETA)
    model_type = checkpoint.get(prefix + "model_type", str, USUAL_MODEL_TYPE)
    types = _layer_types(checkpoint, prefix)
    modes = _modes(checkpoint, types, causal_windows=member not in _SEE_BOTH_WAYS and model_type != _MUSE)
    if anywhere(checkpoint, "use_swa", bool):
        types = [_SLIDING] * len(types)
        window = anywhere(checkpoint, "swa_window_size", int) or checkpoint.get(prefix + "sliding_window", int)
    elif _SLIDING in types:
        window = checkpoint.get(prefix + "sliding_window", int)
    else:
        window = None
    filled = {
        "model_type": USUAL_MODEL_TYPE if model_type == _MUSE else model_type,
        "layer_types": types,
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }
    return {name: value for name, value in stated.items() if name not in _REPLACED} | filled, modes


def _layer_types(checkpoint: Checkpoint, prefix: str) -> list[str]:
    num_layers = checkpoint.get(prefix + "num_hidden_layers", int)
    windowed = checkpoint.get(prefix + "use_sliding_window", bool, False)
    types: list[str] = (
        checkpoint.get(prefix + "layer_types", list)
        if windowed
        else checkpoint.get(prefix + "layer_types", list, [_FULL] * num_layers)
    )
    if len(types) != num_layers:
        expected = f"one for each of num_hidden_layers ({num_layers})"
        raise unusable(checkpoint, prefix + "layer_types", expected, types)
    return types


def _modes(checkpoint: Checkpoint, types: list[str], *, causal_windows: bool) -> tuple[AttentionMode, ...]:
    """Full-attention layers were trained bidirectional inside the block, unless it is stated.

    Sliding ones are causal or not by the member's custom; `speculators` files state it for these only.
    """
    stated = anywhere(checkpoint, "is_causal", bool)
    if stated is None:
        stated = checkpoint.get("dflash_config.causal", bool, None)
    if stated is not None:
        return ("causal_block" if stated else "full_block",) * len(types)
    stated = anywhere(checkpoint, "sliding_window_non_causal", bool)
    causal_windows = causal_windows if stated is None else not stated
    sliding: AttentionMode = "causal_block" if causal_windows else "full_block"
    return tuple(sliding if each == _SLIDING else "full_block" for each in types)
