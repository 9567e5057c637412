"""Which proposer SGLang is to run, from the environment, and what SGLang may not be told beside it."""

from __future__ import annotations

import os
from typing import Any

from specdec.core.host import SpeculativeConfig
from specdec.sdk.errors import ConfigError, Refusal

VARIABLE = "SPECDEC_SGLANG"
"""Of the environment: our `speculative_config` as JSON. SGLang's processes inherit it."""

ON_ERROR = "disable"
"""Unless asked otherwise: with our engine's own default, "raise", a failing proposer would end SGLang's scheduler."""


def read_settings(num_verified: int | None) -> SpeculativeConfig:
    """What the environment says, with as many drafts as SGLang verifies beside the newest token.

    Raises ConfigError: SD-E130, SD-E132 (a wrong key or value), SD-E133 (no proposer named), SD-E196 (said twice).
    """
    example = f"""{VARIABLE}='{{"method": "ngram"}}'"""
    if VARIABLE not in os.environ:
        raise ConfigError("SD-E133", "no proposer is named", {"variable": VARIABLE, "fix": example})
    if num_verified is None or num_verified < 2:
        facts = {"found": num_verified, "fix": "--speculative-num-draft-tokens 5, for 4 drafts and the newest token"}
        raise ConfigError("SD-E133", "SGLang is not told how many tokens to verify", facts)
    values = SpeculativeConfig.as_mapping(os.environ[VARIABLE])
    if "num_speculative_tokens" in values:
        facts = {"key": "num_speculative_tokens", "fix": "leave it to --speculative-num-draft-tokens"}
        raise ConfigError("SD-E196", f"{VARIABLE} has a key that SGLang's arguments have", facts)
    if values.get("rejection_sample_method", "standard") != "standard":
        raise Refusal("SGLang verifies drafts by a rule of its own", "no rejection_sample_method")
    asked = {"on_proposer_error": ON_ERROR} | values | {"num_speculative_tokens": num_verified - 1}
    return SpeculativeConfig.parse(asked)


def refuse_plan(server_args: Any) -> None:
    """Raise Refusal for a way to run SGLang in which drafting was not tried."""
    for name in ("tp_size", "pp_size", "dp_size"):
        if getattr(server_args, name) > 1:
            raise Refusal(f"SGLang runs with {name}={getattr(server_args, name)}, which was not tried", f"{name}=1")
    if server_args.disaggregation_mode != "null":
        raise Refusal("prompts and outputs are computed by two engines, which was not tried", "one engine for both")
