"""What a transformers network stores per token, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Refusal
from ..extensions import DraftKV

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
