"""What vLLM's processes must know of a proposer, decided once in the first of them."""

from __future__ import annotations

from typing import Any

from specdec.sdk.extensions import DraftKV

KEY = "specdec_plan"
"""In `additional_config`, which reaches every process and is part of the key of vLLM's compiled graphs."""


def plan_of(vllm_config: Any) -> dict[str, object]:
    """Raises ConfigError, PluginLoadError, Refusal: whatever can be refused before weights load."""
    from ..vllm import method_of
    from ..vllm_shared.prepare import Prepared

    needs = Prepared.of(method_of(vllm_config.speculative_config.model), vllm_config, in_worker=False).needs
    kv = needs.extension(DraftKV)
    return {
        "lookahead": needs.lookahead if kv else 0,
        "drops_last_block": kv is not None and kv.depends_on_next_token,
        "hidden_states": list(needs.hidden_states),
    }
