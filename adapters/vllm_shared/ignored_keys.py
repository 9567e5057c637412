"""Keys of vLLM's `speculative_config` that nobody would read where the proposer is one of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from specdec.core.host import SpeculativeConfig
from specdec.sdk.errors import ConfigError

from .settings import WHERE

READ = frozenset(
    {
        "model",
        "method",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "draft_sample_method",
        "rejection_sample_method",
    }
)
"""By the adapter, or by what vLLM does around a drafter."""

_FILLED_IN = frozenset({"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"})
"""By vLLM, not by the user. It also sets `prompt_lookup_*` to 0, which a user cannot."""

_ALREADY_SO = {"enforce_eager": True, "draft_tensor_parallel_size": 1, "prompt_lookup_max": 0, "prompt_lookup_min": 0}

_FIXES = {
    "draft_tensor_parallel_size": "leave it out: every worker has the whole draft network",
    "tensor_parallel_size": "leave it out: every worker has the whole draft network",
    "max_model_len": "leave it out: drafts are made up to the target's length. A request asks for none with "
    '"vllm_xargs": {"specdec": "{\\"speculative\\": false}"}',
    "revision": f'download that revision, and give its directory as {WHERE}["model"]',
    "code_revision": f'download that revision, and give its directory as {WHERE}["model"]',
}

_OPTIONS = ("prompt_lookup_", "suffix_decoding_")
"""How options of packaged proposers begin that have vLLM's names."""


def refuse_ignored(speculative: Any) -> None:
    """Raise ConfigError SD-E215 for keys of vLLM's SpeculativeConfig that the user gave and nobody reads."""
    ignored = {name: value for name, value in _given(speculative) if name not in READ}
    if ignored:
        facts = {f"{name}={value!r}": _fix(name) for name, value in ignored.items()}
        summary = "vLLM's speculative_config has keys that a proposer of ours does not read"
        raise ConfigError("SD-E215", summary, facts)


def _given(speculative: Any) -> Iterator[tuple[str, Any]]:
    """Fields that have another value than if nobody had set them, with the value."""
    for field in dataclasses.fields(speculative):
        default = field.default.default if isinstance(field.default, FieldInfo) else field.default
        value = getattr(speculative, field.name)
        if field.name not in _FILLED_IN and value not in (default, _ALREADY_SO.get(field.name, default)):
            yield field.name, value


def _fix(name: str) -> str:
    if name in _FIXES:
        return _FIXES[name]
    if name.startswith(_OPTIONS):
        return f'{WHERE}["proposer_config"]["{name}"]'
    if name in SpeculativeConfig.model_fields:
        return f'{WHERE}["{name}"]'
    return "leave it out: vLLM's own drafters alone read it"
