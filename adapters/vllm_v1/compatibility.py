"""Whether the vLLM at hand is one that this adapter was written for: its version, and every signature relied on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..vllm_shared.followed_grammars import KINDS
from ..written_for import check_engine

TRIED_VERSIONS = ("0.32.0",)

METHODS: Mapping[str, tuple[str, ...]] = {
    "_update_states": ("self", "scheduler_output"),
    "_input_fits_in_drafter": ("self", "common_attn_metadata"),
    "_get_spec_decode_draft_probs": ("self", "spec_decode_metadata"),
    "_sample": ("self", "logits", "spec_decode_metadata"),
    "_setup_eagle3_aux_hidden_state_outputs": ("self",),
    "shutdown": ("self",),
    "propose_draft_token_ids": (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
}
"""Methods of GPUModelRunner that are wrapped, and their parameters."""

OF_GRAMMARS: Mapping[str, tuple[str, ...]] = {
    "validate_tokens": ("self", "request", "spec_tokens"),
    "grammar_bitmask": ("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
}
"""Methods of StructuredOutputManager that are wrapped, and their parameters."""

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "expand_batch_to_tokens": ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    "apply_sampling_constraints": ("logits", "cu_num_draft_tokens", "sampling_metadata"),
}
"""Functions of the rejection sampler's module that are replaced on a CPU, and their parameters."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "SchedulerOutput": (
        "scheduled_new_reqs",
        "finished_req_ids",
        "preempted_req_ids",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "num_spec_tokens_to_schedule",
    ),
    "CachedRequestState": ("prompt_token_ids", "sampling_params", "output_token_ids", "mm_features"),
    "SpecDecodeMetadata": ("num_draft_tokens",),
    "StructuredOutputsParams": (*KINDS, "_backend"),
    "StructuredOutputsConfig": ("backend", "disable_any_whitespace", "reasoning_parser", "enable_in_reasoning"),
}
"""Fields of vLLM's dataclasses that are read."""


def check_vllm() -> None:
    """Raise PluginLoadError SD-E195 if a signature differs; warn of a version that nobody tried."""
    import vllm

    check_engine("vLLM", vllm.__version__, TRIED_VERSIONS, differences(_found()))


def differences(found: Mapping[str, Sequence[str] | None]) -> list[str]:
    """How parameters and fields differ from what is relied on. None: gone. Fields beyond those read do not matter."""
    lines: list[str] = []
    for name, expected in {**METHODS, **OF_GRAMMARS, **FUNCTIONS, **FIELDS}.items():
        there = found.get(name)
        if there is None:
            lines.append(f"{name} is gone")
        elif name in FIELDS and not set(expected) <= set(there):
            lines.append(f"{name} has no {', '.join(field for field in expected if field not in there)}")
        elif name not in FIELDS and tuple(there) != expected:
            lines.append(f"{name}({', '.join(there)}), expected ({', '.join(expected)})")
    return lines


def _found() -> dict[str, Sequence[str] | None]:
    from vllm.config import StructuredOutputsConfig
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    found: dict[str, Sequence[str] | None] = {}
    for owner, names in ((GPUModelRunner, METHODS), (StructuredOutputManager, OF_GRAMMARS)):
        found |= {name: _parameters(getattr(owner, name, None)) for name in names}
    found |= {name: _parameters(getattr(rejection_sampler, name, None)) for name in FUNCTIONS}
    asked_for = StructuredOutputsParams, StructuredOutputsConfig
    for cls in (SchedulerOutput, CachedRequestState, SpecDecodeMetadata, *asked_for):
        found[cls.__name__] = tuple(field.name for field in dataclasses.fields(cls))
    return found


def _parameters(function: Any) -> tuple[str, ...] | None:
    return None if function is None else tuple(inspect.signature(function).parameters)
