"""A target's tokenizer, the tokens that end its texts, and the sampling parameters that its checkpoint states."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

from specdec.sdk.errors import ConfigError, message
from specdec.sdk.json_files import read_json_file

from ..config.sampling_params import SamplingParams
from .loading import loading

_TAKEN = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_TAKEN["max_new_tokens"] = "max_tokens"
_ENDS = "eos_token_id", "bos_token_id", "pad_token_id"  # read elsewhere, as are the others that say nothing here
_SHOWN = "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"
_SAYS_NOTHING = {*_TAKEN, *_ENDS, *_SHOWN, "transformers_version", "do_sample", "use_cache", "max_length"}


def load_tokenizer(asked: str | Path | None, path: str, *, trust_remote_code: bool) -> Any:
    """The tokenizer that is asked for, or else the model's. None means that its directory has none.

    Raises ConfigError SD-E149.
    """
    name = str(asked or path)
    try:
        with loading("SD-E149", f"cannot load the tokenizer {name!r}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except ConfigError as error:
        if asked or _has_tokenizer(path, isinstance(error.__cause__, ImportError)):
            raise
        return None
    if asked is None and len(tokenizer) <= len(tokenizer.all_special_ids):
        return None  # what transformers makes up where there are no tokenizer files: special tokens and no others
    if not tokenizer.is_fast:
        facts = {"found": type(tokenizer).__name__, "fix": "pass token ids, or a tokenizer.json"}
        raise ConfigError("SD-E149", "the tokenizer has no tokenizer.json, which streaming needs", facts)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(name)
    return tokenizer


def _template_of_processor(name: str) -> str | None:
    """Models of several modalities may have their template in a file of their own. None means that there is none."""
    with suppress(OSError, ValueError):
        template = read_json_file(Path(cached_file(name, "chat_template.json")))
        return str(template["chat_template"]) if isinstance(template, dict) and "chat_template" in template else None
    return None


def _has_tokenizer(path: str, needs_library: bool) -> bool:
    """Whether the files of a tokenizer that could be used are there; `needs_library`: if it were installed."""
    directory = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json") if needs_library else ("tokenizer.json",)
    return any((directory / name).is_file() for name in names) or (needs_library and not directory.is_dir())


def eos_token_ids(generation_config: Any, config: Any) -> frozenset[int]:
    """End tokens by a model's generation settings, or else by its configuration."""
    eos = generation_config.eos_token_id
    eos = config.to_dict().get("eos_token_id") if eos is None else eos  # some configurations have none
    return frozenset([eos] if isinstance(eos, int) else eos or ())


def default_params(asked: str | Path, own: GenerationConfig) -> SamplingParams:
    """What `EngineConfig.generation_config` asks for, as vLLM reads it. `own`: of the checkpoint.

    Says once what is left out. Raises ConfigError: SD-E143 where a folder has no such file, SD-E132 for values that
    are out of range.
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
