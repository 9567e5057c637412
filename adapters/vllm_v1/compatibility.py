"""Whether the vLLM at hand is one that this adapter was written for: its version, and every signature relied on."""

from __future__ import annotations

from ..vllm_shared import relied_on
from ..written_for import Names, check_engine, differences, folder_of

_RUNNER = "v1/worker/gpu_model_runner.py:GPUModelRunner"
_SAMPLER = "v1/sample/rejection_sampler.py"

PARAMETERS: Names = {
    **relied_on.PARAMETERS,
    f"{_RUNNER}._update_states": "self, scheduler_output",
    f"{_RUNNER}._input_fits_in_drafter": "self, common_attn_metadata",
    f"{_RUNNER}._get_spec_decode_draft_probs": "self, spec_decode_metadata",
    f"{_RUNNER}._sample": "self, logits, spec_decode_metadata",
    f"{_RUNNER}._setup_eagle3_aux_hidden_state_outputs": "self",
    f"{_RUNNER}.shutdown": "self",
    f"{_RUNNER}.propose_draft_token_ids": (
        "self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, "
        "aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings"
    ),
    f"{_SAMPLER}:expand_batch_to_tokens": "x, cu_num_tokens, num_tokens, replace_from, replace_to",
    f"{_SAMPLER}:apply_sampling_constraints": "logits, cu_num_draft_tokens, sampling_metadata",
}
"""Functions of vLLM that are wrapped or, on a CPU, replaced, and their parameters."""

MEMBERS: Names = {
    **relied_on.MEMBERS,
    "v1/core/sched/output.py:SchedulerOutput": (
        "scheduled_new_reqs, finished_req_ids, preempted_req_ids, num_scheduled_tokens, scheduled_spec_decode_tokens, "
        "num_spec_tokens_to_schedule"
    ),
    "v1/worker/gpu_input_batch.py:CachedRequestState": (
        "prompt_token_ids, sampling_params, output_token_ids, mm_features"
    ),
    "v1/spec_decode/metadata.py:SpecDecodeMetadata": "num_draft_tokens",
}
"""Classes of vLLM, and what is read of them."""


def check_vllm() -> None:
    """Raise PluginLoadError SD-E195 if a signature differs; warn of a version that nobody tried."""
    import vllm

    differing = differences(folder_of("vllm"), PARAMETERS, MEMBERS)
    check_engine("vLLM", vllm.__version__, relied_on.TRIED_VERSIONS, differing)
