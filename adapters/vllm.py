"""Any specdec proposer inside vLLM, as its `custom_class`: one class per proposer name, made when it is asked for.

    LLM(..., speculative_config={"model": "specdec.adapters.vllm.ngram", "num_speculative_tokens": 5},
        additional_config={"specdec": {"proposer_config": {...}}})

`additional_config["specdec"]` holds the keys of our own `speculative_config` except those that vLLM's has: the draft
checkpoint (`model`), the proposer's options (`proposer_config`), `on_proposer_error`, ... A class path, or a name that
is no identifier, stands there as `method`; the class is then `Configured`. Importing this module imports no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .vllm_v1.drafter import Drafter

CONFIGURED = "Configured"
"""The class of the proposer that `additional_config["specdec"]` names."""


def __getattr__(name: str) -> type[Drafter]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_v1.drafter import Drafter

    return type(name, (Drafter,), {"method": None if name == CONFIGURED else name, "__module__": __name__})
