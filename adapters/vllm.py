"""Any specdec proposer inside vLLM, as its `custom_class`: one name per proposer, in both of its model runners.

    LLM(..., speculative_config={"model": "specdec.adapters.vllm.ngram", "num_speculative_tokens": 5},
        additional_config={"specdec": {"proposer_config": {...}}})

`additional_config["specdec"]` holds the keys of our own `speculative_config` except those that vLLM's has: the draft
checkpoint (`model`), the proposer's options (`proposer_config`), `on_proposer_error`, ... A class path, or a name that
is no identifier, stands there as `method`; the name is then `Configured`. The V1 runner makes a class of this name, V2
reads the name only (`vllm_v2/plugin.py`). Importing this module imports no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .vllm_v1.drafter import Drafter

CONFIGURED = "Configured"
"""The class of the proposer that `additional_config["specdec"]` names."""


PREFIX = f"{__name__}."


def method_of(model: str) -> str | None:
    """The proposer that vLLM's `model` names. None: the one that the settings name."""
    name = model.removeprefix(PREFIX)
    return None if name == CONFIGURED else name


def is_ours(speculative: Any) -> bool:
    """Whether a vLLM `speculative_config` names a proposer of ours. None: no speculation."""
    if speculative is None or speculative.method != "custom_class":
        return False
    return isinstance(speculative.model, str) and speculative.model.startswith(PREFIX)


def __getattr__(name: str) -> type[Drafter]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .vllm_v1.drafter import Drafter

    return type(name, (Drafter,), {"method": method_of(name), "__module__": __name__})
