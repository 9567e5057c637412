"""Rotary tables that stay as they are, where transformers would look at the positions of every pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

STATIC = "default"  # what transformers calls tables that no pass changes


def freeze_tables(network: nn.Module, max_length: int) -> None:
    """Keep the tables of "dynamic" and "longrope" layers, if no text of `max_length` tokens changes them.

    transformers chooses between tables by the largest position of a pass. On a device the host would wait for it in
    every pass, and a pass could not be captured.
    """
    for module in network.modules():
        kinds, config = vars(module).get("rope_type"), vars(module).get("config")
        if isinstance(kinds, str):
            module.rope_type = _kept(kinds, module, config.rope_parameters, max_length)  # type: ignore[union-attr,assignment]
        elif isinstance(kinds, Mapping):
            module.rope_type = {  # type: ignore[assignment]
                layer: _kept(kind, module, config.rope_parameters[layer], max_length)  # type: ignore[union-attr]
                for layer, kind in kinds.items()
            }


def _kept(kind: str, module: nn.Module, parameters: Mapping[str, Any], max_length: int) -> str:
    if kind == "longrope" and max_length <= parameters["original_max_position_embeddings"]:
        return STATIC
    if "dynamic" in kind and max_length <= vars(module)["max_seq_len_cached"]:
        return STATIC
    return kind
