"""Models that `torch.compile` has been asked for. What runs compiled calls no hook that was added later."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch._dynamo.eval_frame import innermost_fn

from specdec.sdk.errors import ConfigError


def as_generated(model: Any) -> Any:
    """The model that `generate` runs: that of a `torch.compile(model)` runs the model inside, as it was written."""
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def refuse_compiled(model: nn.Module) -> None:
    """Raise ConfigError SD-E198 if a part of the model runs compiled: its layers cannot be watched then."""
    parts = [name or "the whole model" for name, module in model.named_modules() if _is_compiled(module)]
    if parts:
        facts = {
            "found": f"compiled by torch.compile: {parts[0]}" + (f" and {len(parts) - 1} more" if parts[1:] else ""),
            "why": "compiled code calls no hook that was added later, and hidden states and states of layers need one",
            "fix": "a model that is not compiled, or a proposer that reads tokens only, such as ngram",
        }
        raise ConfigError("SD-E198", "this model's layers run compiled", facts)


def _is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward", module.forward)
    compiled_call = module._compiled_call_impl is not None
    return compiled_call or isinstance(module, OptimizedModule) or innermost_fn(forward) is not forward
