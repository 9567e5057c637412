"""Whether the SGLang at hand is one that this adapter was written for: its version, and every signature relied on."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from ..written_for import check_engine

TRIED_VERSIONS = ("0.5.23",)

METHODS: Mapping[str, tuple[str, ...]] = {
    "__init__": ("self", "server_args", "gpu_id", "nccl_port", "target_worker"),
    "alloc_memory_pool": ("self", "kwargs"),
    "note_request_finished": ("self", "rid", "natural_stop"),
    "clear_cache_pool": ("self",),
    "_prepare_draft_tokens": ("self", "batch"),
    "_update_ngram_corpus": ("self", "batch"),
}
"""Methods of NGRAMWorker that are overridden, and their parameters."""


def check_sglang() -> None:
    """Raise PluginLoadError SD-E195 if a signature differs; warn of a version that nobody tried."""
    from sglang.srt.speculative import ngram_worker

    check_engine("SGLang", version("sglang"), TRIED_VERSIONS, differences(ngram_worker))


def differences(module: Any) -> list[str]:
    """How the worker's methods differ from what is relied on."""
    lines = [] if "NgramCorpus" in vars(module) else ["NgramCorpus is gone"]
    for name, expected in METHODS.items():
        method = getattr(module.NGRAMWorker, name, None)
        there = None if method is None else tuple(inspect.signature(method).parameters)
        if there is None:
            lines.append(f"{name} is gone")
        elif there != expected:
            lines.append(f"{name}({', '.join(there)}), expected ({', '.join(expected)})")
    return lines
