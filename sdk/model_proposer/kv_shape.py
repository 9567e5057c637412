"""What the configuration of a draft network's layers says: its gaps filled, and what they store per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..checkpoint import Checkpoint
from ..errors import Refusal
from ..extensions import DraftKV
from ..types import TargetInfo

_HEADS = ("head_dim", "num_attention_heads", "num_key_value_heads")


def draft_kv_of(
    config: Mapping[str, Any],
    *,
    num_layers: int,
    lookahead: int,
    dtype: str | None,
    depends_on_next_token: bool = False,
) -> DraftKV:
    """The draft KV of `num_layers` attention layers of a configuration, multi-head latent attention included.

    config: a configuration with transformers' common names.
    num_layers: attention layers that keep keys and values.
    lookahead: positions past the newest token that one draft pass writes.
    dtype: torch dtype name. None means the target's.
    depends_on_next_token: whether a row's KV is computed from the token that follows it.

    Raises Refusal if the configuration states no number of attention heads, or heads of its own for some layers.
    """
    num_heads = config.get("num_attention_heads")
    if num_heads is None:
        raise Refusal("the draft checkpoint's configuration states no num_attention_heads")
    by_layer = (config.get("per_layer_config") or {}).items()
    own = [layer for layer, each in by_layer if any(key in each and each[key] != config.get(key) for key in _HEADS)]
    if own:
        reason = f"its layers {', '.join(own)} have heads of their own (per_layer_config), and draft KV has one shape"
        raise Refusal(reason, "a draft network whose layers have the same heads")
    shape: dict[str, Any] = {
        "num_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
    }
    if config.get("kv_lora_rank") is not None:  # keys and values are decompressed before they are stored
        shape = {
            "num_heads": num_heads,
            "head_dim": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
            "value_head_dim": config["v_head_dim"],
        }
    return DraftKV(
        num_layers=num_layers,
        lookahead=max(lookahead, 1),
        dtype=dtype,
        depends_on_next_token=depends_on_next_token,
        **shape,
    )


def layers_config(checkpoint: Checkpoint, prefix: str, rope_theta: float) -> dict[str, Any]:
    """The configuration of a head's decoder layers for transformers, with the gaps that publishers leave filled.

    prefix: where config.json has it, "" or "KEY.".
    rope_theta: what is meant where none is stated.

    Raises CheckpointError: SD-E170, SD-E171.
    """
    stated = checkpoint.config if not prefix else checkpoint.get(prefix.rstrip("."), dict)
    width, heads = checkpoint.get(prefix + "hidden_size", int), checkpoint.get(prefix + "num_attention_heads", int)
    kept = {name: value for name, value in stated.items() if name not in ("rope_theta", "rope_scaling")}
    return kept | {
        "head_dim": checkpoint.get(prefix + "head_dim", int, width // max(heads, 1)),
        "num_key_value_heads": checkpoint.get(prefix + "num_key_value_heads", int, heads),
        "intermediate_size": checkpoint.get(prefix + "intermediate_size", int),
        "rms_norm_eps": float(checkpoint.get(prefix + "rms_norm_eps", (int, float), 1e-6)),
        "rope_parameters": _rope_parameters(checkpoint, prefix, rope_theta),
    }


def _rope_parameters(checkpoint: Checkpoint, prefix: str, theta: float) -> dict[str, Any]:
    """`rope_parameters` wins over the older fields, which may hold a class's default."""
    names = (prefix + name for name in ("rope_parameters", "rope_scaling"))
    rope = dict(next((each for name in names if (each := checkpoint.get(name, dict, None))), {}))
    older_type = rope.pop("type", "default")
    rope.setdefault("rope_type", older_type)
    rope.setdefault("rope_theta", checkpoint.get(prefix + "rope_theta", (int, float), None) or theta)
    return rope


def require_positions(config: Mapping[str, Any], target: TargetInfo) -> None:
    """Raise Refusal if rotary tables would change with the longest text of a batch, and cached keys would not.

    config: what `layers_config` gives, or a model's own, by transformers' common names.
    """
    stated = config.get("rope_parameters") or {}
    by_layer_type = [each for each in stated.values() if isinstance(each, Mapping)]
    for rope in [stated] if "rope_type" in stated else by_layer_type:
        limit = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        if rope.get("rope_type") in ("dynamic", "longrope") and limit is not None and target.max_model_len > limit:
            kind = f"{rope['rope_type']!r} rotary scaling keeps its tables up to {limit} positions"
            raise Refusal(f"its {kind}, and max_model_len is {target.max_model_len}", f"max_model_len={limit}")
