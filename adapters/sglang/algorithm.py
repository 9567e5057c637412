"""What SGLang asks of an algorithm before it makes a worker."""

from __future__ import annotations

import json
import os
from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from specdec.core.host import SpeculativeConfig
from specdec.sdk.errors import ConfigError, Refusal

from .compatibility import check_sglang

VARIABLE = "SPECDEC_SGLANG"
"""Of the environment: our `speculative_config` as JSON. SGLang's processes inherit it."""

ON_ERROR = "disable"
"""Unless asked otherwise: with our engine's own default, "raise", a failing proposer would end SGLang's scheduler."""


class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
    """Drafts come from outside a network of SGLang's, as those of its n-grams do. So it is told to treat them alike."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:  # asked of every algorithm, and missing in the base class
        return False

    def need_topk(self) -> bool:  # likewise
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, *args: Any, **kwargs: Any) -> FutureMap:
        """Likewise. What relays tokens between overlapping steps; here steps follow one another."""
        return FutureMap(device, self, req_to_token_pool, *args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        """Settle what SGLang settles for n-grams. Raises PluginLoadError SD-E195, ConfigError, Refusal."""
        check_sglang()
        read_settings(server_args.speculative_num_draft_tokens)
        refuse_plan(server_args)
        server_args.disable_overlap_schedule = True
        server_args.enable_mixed_chunk = False
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48


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
    return SpeculativeConfig.parse(
        json.dumps({"on_proposer_error": ON_ERROR} | values | {"num_speculative_tokens": num_verified - 1})
    )


def refuse_plan(server_args: Any) -> None:
    """Raise Refusal for a way to run SGLang in which drafting was not tried."""
    for name in ("tp_size", "pp_size", "dp_size"):
        if getattr(server_args, name) > 1:
            raise Refusal(f"SGLang runs with {name}={getattr(server_args, name)}, which was not tried", f"{name}=1")
    if server_args.disaggregation_mode != "null":
        raise Refusal("prompts and outputs are computed by two engines, which was not tried", "one engine for both")
