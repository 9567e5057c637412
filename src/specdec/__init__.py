"""Write, prove, measure and ship speculative-decoding proposers.

`specdec.sdk` is the contract for proposers, `specdec.core` the engine. The names below are loaded on first use, so
that `import specdec` and `import specdec.sdk` stay light (no torch).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.config.sampling_params import SamplingParams
    from .core.engine.outputs import CompletionOutput, RequestOutput
    from .core.llm import LLM

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": ".core.llm",
    "CompletionOutput": ".core.engine.outputs",
    "RequestOutput": ".core.engine.outputs",
    "SamplingParams": ".core.config.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
