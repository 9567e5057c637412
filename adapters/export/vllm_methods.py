"""Facts about vLLM 0.32 and 0.33: which methods it runs itself, and what it calls their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSIONS = "0.32 and 0.33"


@dataclass(frozen=True, kw_only=True)
class NativeMethod:
    """A method of vLLM's own, for the proposer of this package that has its name."""

    options: frozenset[str] = frozenset()  # that vLLM has under the same name
    notes: tuple[str, ...] = ()  # what differs


NATIVE: Mapping[str, NativeMethod] = {
    "draft_model": NativeMethod(),
    "eagle": NativeMethod(),
    "eagle3": NativeMethod(),
    "dflash": NativeMethod(
        notes=("vLLM runs drafters of the speculators format as causal unless sliding_window_non_causal is set",)
    ),
    "dspark": NativeMethod(notes=("vLLM 0.32 runs every Markov head as vanilla; gated and rnn heads do not load",)),
    "mtp": NativeMethod(),
    "ngram": NativeMethod(
        options=frozenset({"prompt_lookup_min", "prompt_lookup_max"}),
        notes=("vLLM drafts what followed the earliest match, and matches 5 tokens if no length is given",),
    ),
    "suffix": NativeMethod(
        options=frozenset(
            {
                "suffix_decoding_max_tree_depth",
                "suffix_decoding_max_cached_requests",
                "suffix_decoding_max_spec_factor",
                "suffix_decoding_min_token_prob",
            }
        ),
        notes=("vLLM needs the package arctic-inference for it",),
    ),
}
"""medusa is not here: vLLM 0.33 has it no longer."""

COMMON = frozenset({"num_speculative_tokens", "draft_sample_method", "rejection_sample_method"})
"""Common keys of ours that vLLM has under the same name and with the same meaning."""

REASONS: Mapping[str, str] = {
    "on_proposer_error": "vLLM's own drafters have no such policy: an error ends its engine",
    "moe_backend": "the names are transformers'; vLLM's kernels have others (its own moe_backend key)",
    "dtype": "vLLM runs a drafter in the target's dtype",
    "quantization": "weights are quantised here as they are loaded; vLLM reads them as they are stored",
}
"""Why a common key that was written does not reach a drafter of vLLM's own."""
