"""What both runners' adapters rely on in vLLM. Light: the first process of vLLM reads it before it loads anything."""

from __future__ import annotations

from ..written_for import Names

TRIED_VERSIONS = ("0.32.0",)

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Of grammars, and what vLLM's StructuredOutputsParams calls them."""

_GRAMMARS = "v1/structured_output/__init__.py:StructuredOutputManager"

PARAMETERS: Names = {
    f"{_GRAMMARS}.validate_tokens": "self, request, spec_tokens",
    f"{_GRAMMARS}.grammar_bitmask": "self, requests, structured_output_request_ids, scheduled_spec_decode_tokens",
}
"""Functions of vLLM that are wrapped for both of its runners, and their parameters."""

MEMBERS: Names = {
    _GRAMMARS: "vllm_config",
    "v1/engine/input_processor.py:InputProcessor": "process_inputs, vllm_config",
    "sampling_params.py:SamplingParams": "structured_outputs",
    "sampling_params.py:StructuredOutputsParams": ", ".join([*KINDS, "_backend"]),
    "config/structured_outputs.py:StructuredOutputsConfig": (
        "backend, disable_any_whitespace, reasoning_parser, enable_in_reasoning"
    ),
}
"""Classes of vLLM, and what is read of them for both of its runners."""
