"""On a CPU without AMX SGLang takes `torch_native`, which verifies no drafts: its backend for AMX runs instead."""

from __future__ import annotations


def install() -> None:
    """SGLang calls it in each of its processes, as a plugin."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
