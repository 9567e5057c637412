"""What the user wrote to vLLM, as our own speculative config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from specdec.core.host import SpeculativeConfig
from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.ranges import LimitOrZero


class Supervision(StrictModel):
    """The adapter's own keys beside those of our `speculative_config`: how a proposer is looked after."""

    retry_after_steps: LimitOrZero = 1000  # a proposer that was switched off is asked again; 0: never
    hang_seconds: Annotated[float, Field(gt=0, le=1e6)] = 30.0  # a call that has not returned by then is named


KEY = "specdec"
WHERE = f'additional_config["{KEY}"]'
ON_ERROR = "disable"
"""Unless asked otherwise: with our engine's own default, "raise", a failing proposer would end vLLM's engine."""

_VLLMS = ("num_speculative_tokens", "draft_sample_method", "rejection_sample_method")


def read_settings(
    method: str | None, additional_config: object, num_draft_tokens: int, draft_sample_method: str
) -> SpeculativeConfig:
    """The proposer `method`, or the one that `additional_config["specdec"]` names, with the settings that stand there.

    Raises ConfigError: SD-E131, SD-E132 (a wrong key or value), SD-E133 (no proposer named), SD-E196 (said twice).
    """
    values, _ = _split(additional_config)
    twice = [key for key in _VLLMS if key in values]
    if twice:
        facts = {"key": ", ".join(twice), "fix": "leave it to vLLM's speculative_config"}
        raise ConfigError("SD-E196", f"{WHERE} has a key that vLLM's speculative_config has", facts)
    if method is not None and values.get("method", method) != method:
        facts = {"class": method, f"{WHERE}.method": values["method"]}
        facts["fix"] = "leave the method out, or use the class specdec.adapters.vllm.Configured"
        raise ConfigError("SD-E196", "the class and the settings name different proposers", facts)
    named = {} if method is None else {"method": method}
    return SpeculativeConfig(
        **{"on_proposer_error": ON_ERROR} | values | named,
        num_speculative_tokens=num_draft_tokens,
        draft_sample_method=draft_sample_method,
    )


def read_supervision(additional_config: object) -> Supervision:
    """Raises ConfigError SD-E132."""
    _, own = _split(additional_config)
    return Supervision.parse(own, WHERE)


def _split(additional_config: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section's keys of `speculative_config`, and the adapter's own."""
    section = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    values: dict[str, Any] = SpeculativeConfig.as_mapping(section or {})
    own = {key: values.pop(key) for key in Supervision.key_names() & values.keys()}
    return values, own
