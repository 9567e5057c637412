"""Checkpoints whose weights are stored quantised: which of them can be served, known from their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.sdk.errors import ConfigError, UnsupportedModelError


def is_stored_quantised(config: Any) -> bool:
    """Whether a checkpoint's configuration says that its weights are quantised."""
    return config.to_dict().get("quantization_config") is not None


def check_stored_quantization(config: Any, asked: str | None) -> None:
    """Refuse what would be quantised twice, and layers whose output for a token depends on the tokens beside it.

    Raises ConfigError SD-E266, UnsupportedModelError SD-E267.
    """
    stored = config.to_dict().get("quantization_config")
    if stored is None:
        return
    method = stored.get("quant_method")
    if asked is not None:
        facts = {"stored": method, "asked": asked, "fix": "leave `quantization` out: it is loaded as it is"}
        raise ConfigError("SD-E266", "the checkpoint is quantised already", facts)
    because = _why_batch_dependent(stored)
    if because:
        facts = {"quant_method": method, "because": because}
        raise UnsupportedModelError("SD-E267", "this quantisation computes a token with those beside it", facts)


def _why_batch_dependent(stored: Mapping[str, Any]) -> str | None:
    if stored.get("load_in_8bit") and stored.get("llm_int8_threshold", 0.0) > 0.0:
        return "8-bit layers choose what they leave in 16 bits by all tokens of a pass (llm_int8_threshold above 0)"
    groups = stored.get("config_groups") or {}
    activations = [group.get("input_activations") or {} for group in groups.values() if isinstance(group, Mapping)]
    if any(each.get("dynamic") is True and each.get("strategy") == "tensor" for each in activations):
        return "activations are scaled by the largest of all tokens of a pass (input_activations: dynamic, tensor)"
    return None
