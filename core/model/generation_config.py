"""Sampling parameters that a checkpoint states for requests without any, as vLLM reads them."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import GenerationConfig

from specdec.sdk.errors import message

from ..config.sampling_params import SamplingParams
from .loading import loading

_TAKEN = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_TAKEN["max_new_tokens"] = "max_tokens"
_ENDS = "eos_token_id", "bos_token_id", "pad_token_id"  # read elsewhere, as are the others that say nothing here
_SHOWN = "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"
_SAYS_NOTHING = {*_TAKEN, *_ENDS, *_SHOWN, "transformers_version", "do_sample", "use_cache", "max_length"}


def default_params(asked: str | Path, own: GenerationConfig) -> SamplingParams:
    """What `EngineConfig.generation_config` asks for. `own`: of the checkpoint. Says once what is left out.

    Raises ConfigError: SD-E143 where a folder has no such file, SD-E132 for values that are out of range.
    """
    if asked == "vllm":
        return SamplingParams()
    with loading("SD-E143", f"cannot read generation_config.json in {str(asked)!r}"):
        stated = (own if asked == "auto" else GenerationConfig.from_pretrained(asked)).to_diff_dict()
    others = sorted(name for name in stated.keys() - _SAYS_NOTHING if not name.startswith("_"))
    if others:
        facts = {"not applied": ", ".join(others), "fix": "state what SamplingParams has; generation_config='vllm'"}
        logging.getLogger("specdec").warning(
            "%s", message("SD-W310", "generation_config.json says more than is applied", facts)
        )
    taken = {_TAKEN[name]: value for name, value in stated.items() if name in _TAKEN}
    return SamplingParams.parse(taken, "generation_config.json")
