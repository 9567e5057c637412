"""Whether a vLLM has the V2 runner that this adapter was written for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .. import written_for
from ..vllm_shared import relied_on
from ..vllm_shared.relied_on import TRIED_VERSIONS
from ..written_for import Names

_GPU = "v1/worker/gpu"
_RUNNER = f"{_GPU}/model_runner.py:GPUModelRunner"
_SPECULATOR = f"{_GPU}/spec_decode/speculator.py"

PARAMETERS: Names = {
    **relied_on.PARAMETERS,
    "config/vllm.py:VllmConfig.__post_init__": "self",
    "config/vllm.py:VllmConfig._get_v2_model_runner_unsupported_features": "self",
    "config/vllm.py:VllmConfig.num_lookahead_tokens": "self",
    "config/speculative.py:SpeculativeConfig.__post_init__": "self",
    "config/speculative.py:SpeculativeConfig.use_eagle_block_drop": "self",
    f"{_GPU}/spec_decode/__init__.py:init_speculator": "vllm_config, device, req_states",
    f"{_RUNNER}.load_model": "self, load_dummy_weights",
    f"{_RUNNER}.finish_requests": "self, scheduler_output",
    f"{_RUNNER}.add_requests": "self, scheduler_output",
    f"{_RUNNER}.update_requests": "self, scheduler_output",
    f"{_RUNNER}.initialize_kv_cache": "self, kv_cache_config, is_profiling, kv_cache_allocation_context",
    f"{_RUNNER}.take_draft_token_ids": "self",
    f"{_RUNNER}.shutdown": "self",
    f"{_SPECULATOR}:BaseSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
    f"{_SPECULATOR}:BaseSpeculator.capture": "self",
    f"{_SPECULATOR}:BaseSpeculator.propose": (
        "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, "
        "num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state, dummy_run, "
        "skip_attn_for_dummy_run, mm_inputs, is_profile, num_speculative_tokens"
    ),
    f"{_SPECULATOR}:DraftModelSpeculator.load_model": "self, target_model",
    f"{_SPECULATOR}:DraftModelSpeculator.load_draft_model": "self, target_model, target_attn_layer_names",
    f"{_SPECULATOR}:DraftModelSpeculator.set_attn": (
        "self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups"
    ),
    "model_executor/layers/attention_layer_base.py:AttentionLayerBase.bind_kv_cache": "self, kv_cache",
    "model_executor/layers/attention_layer_base.py:AttentionLayerBase.get_attn_backend": "self",
    "model_executor/layers/attention_layer_base.py:AttentionLayerBase.get_kv_cache_spec": "self, vllm_config",
}
"""Functions of vLLM that are wrapped, called or written anew, and their parameters."""

MEMBERS: Names = {
    **relied_on.MEMBERS,
    _RUNNER: "speculator, use_aux_hidden_state_outputs, draft_tokens_handler, req_states",
    f"{_SPECULATOR}:DraftModelSpeculator": (
        "vllm_config, device, speculative_config, num_speculative_steps, dcp_size, eplb_state, "
        "enable_adaptive_verification, acceptance_estimator, draft_logits, draft_watermarker, supports_mm_inputs, "
        "pcp_manager, model, draft_attn_layer_names, attn_groups, observe_verification"
    ),
    f"{_GPU}/states.py:RequestState": "all_token_ids, total_len, max_model_len, device",
    f"{_GPU}/input_batch.py:InputBatch": (
        "req_ids, num_reqs, idx_mapping, num_scheduled_tokens, num_tokens, num_draft_tokens_per_req, query_start_loc, "
        "logits_indices, cu_num_logits_np, input_ids, positions"
    ),
    "v1/core/sched/output.py:NewRequestData": (
        "req_id, prefill_token_ids, prompt_len, sampling_params, mm_features, block_ids"
    ),
    "v1/core/sched/output.py:CachedRequestData": "req_ids, new_block_ids",
    "v1/core/sched/output.py:SchedulerOutput": (
        "scheduled_new_reqs, scheduled_cached_reqs, finished_req_ids, preempted_req_ids"
    ),
    "v1/kv_cache_interface.py:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "v1/outputs.py:DraftTokenIds": "req_ids, draft_token_ids",
    "config/speculative.py:": "NgramGPUTypes",
    "model_executor/models/extract_hidden_states.py:": "CacheOnlyAttentionBackend",
}
"""Classes and modules of vLLM, and what is read of them."""


@cache
def v2_differences() -> tuple[str, ...]:
    """How the installed vLLM differs from what is relied on. Empty if it does not."""
    return tuple(differences(written_for.folder_of("vllm")))


def differences(package: Path) -> list[str]:
    """How the vLLM in a folder differs from what is relied on; [] if it does not."""
    return written_for.differences(package, PARAMETERS, MEMBERS)


def facts_of(differing: Sequence[str]) -> dict[str, str]:
    """What a message says of them."""
    return {
        "written for": f"vLLM {', '.join(TRIED_VERSIONS)}",
        "differs": "\n".join(differing),
        "fix": f"install vLLM {TRIED_VERSIONS[-1]}, or a specdec-sdk written for this one",
        "also": "VLLM_USE_V2_MODEL_RUNNER=0 runs the proposer in the V1 runner, which vLLM takes itself where it may",
    }
