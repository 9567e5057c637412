"""Recording inside vLLM: its engine runs the target, and the taps see its steps through the adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load
from transformers import AutoConfig, GenerationConfig

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.model.model_support import locate_model
from specdec.core.model.tokenizer import eos_token_ids
from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError
from specdec.sdk.structured_outputs import StructuredOutputs

from ..conversation import Texts
from ..environment import environment
from .foreign import target_manifest
from .manifest import Manifest
from .settings import RecordSettings
from .source import Ended, Kept, Source
from .vllm_worker import HIDDEN, LOGITS, SETTINGS, RecordingDrafter, RecordingWorker

DECIDED = {  # by recording: a prompt's every position is computed, and each step's tokens are known after it
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "worker_extension_cls": f"{RecordingWorker.__module__}.{RecordingWorker.__qualname__}",
    "disable_log_stats": True,
}


class VLLMSource(Source):
    """Runs vLLM, with as many requests at a time as vLLM takes."""

    takes_grammars = True

    def __init__(self, settings: RecordSettings, plugins: PluginSettings) -> None:
        """Raises ConfigError: SD-E251 for sampling, SD-E279 without vLLM, SD-E280 for arguments that it does not take.

        What vLLM itself refuses, it says in its own words. The workers read `SPECDEC_` variables, not `plugins`.
        """
        settings.refuse_sampling("vLLM")
        manifest, tokenizer = target_manifest(settings.engine, "vllm", "", settings.hidden_states)
        ends = _ends(locate_model(settings.engine.model), settings.engine.trust_remote_code)
        self.manifest, self.texts = manifest.replace(eos_token_ids=tuple(sorted(ends))), Texts(tokenizer, ends)
        self._vllm, self._engine = _engine(settings, manifest)
        self._names: dict[str, str] = {}  # vLLM's own of each request that is kept
        self._dropped: dict[str, str] = {}  # and of the others

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, kept: bool = True) -> None:
        theirs = self._vllm.SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=True,
            stop_token_ids=[] if params.ignore_eos else sorted(self.texts.eos_token_ids),
            detokenize=False,
            structured_outputs=self._form(params.structured_outputs),
        )
        name = self._engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, theirs)
        (self._names if kept else self._dropped)[request_id] = name

    def _form(self, asked: StructuredOutputs | None) -> Any:
        """The form under vLLM's names. Raises ConfigError SD-E280: whitespace is of all requests there, not of each."""
        if asked is None:
            return None
        theirs = self._engine.vllm_config.structured_outputs_config
        if theirs.disable_any_whitespace != asked.disable_any_whitespace:
            given = json.dumps({"backend": "xgrammar", "disable_any_whitespace": asked.disable_any_whitespace})
            found = f"a prompt with disable_any_whitespace={asked.disable_any_whitespace}, which vLLM decides for all"
            raise _refused(found, f"--vllm '{{\"structured_outputs_config\": {given}}}'")
        options = asked.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return self._vllm.sampling_params.StructuredOutputsParams(**options)

    def step(self) -> Sequence[Ended]:
        ended = []
        for each in self._engine.step():
            if each.finished:
                (output,) = each.outputs
                ended.append(Ended(each.request_id, tuple(output.token_ids), output.finish_reason))
                if each.request_id in self._dropped:
                    self._taken(self._dropped.pop(each.request_id))
        return ended

    def take(self, request_id: str) -> Kept:
        tensors = load(self._taken(self._names.pop(request_id)))
        hidden, logits = tensors.pop(HIDDEN, None), tensors.pop(LOGITS, None)
        return Kept(tensors, hidden, logits)

    def _taken(self, name: str) -> bytes:
        """Take a recorded request from the workers, which all hold the same."""
        first: bytes = self._engine.collective_rpc(RecordingWorker.take_recorded.__name__, args=(name,))[0]
        return first

    def environment(self) -> dict[str, Any]:
        return environment(torch.device(self.manifest.target["device"])) | {"vllm": self._vllm.__version__}

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _engine(settings: RecordSettings, manifest: Manifest) -> tuple[Any, Any]:
    """The library and its engine. Raises ConfigError SD-E279, SD-E280."""
    try:
        import vllm
    except ImportError as error:
        facts = {"because": str(error), "fix": "install vLLM beside specdec-sdk, or record with another --engine"}
        raise ConfigError("SD-E279", "vLLM is to generate, and it cannot be imported", facts) from error
    named = f"{RecordingDrafter.__module__}.{RecordingDrafter.__qualname__}"
    taps = {"top_m": settings.top_m, "full_logits": settings.full_logits}
    own = DECIDED | {
        "model": locate_model(settings.engine.model),
        "dtype": manifest.target["dtype"],
        "max_model_len": manifest.target["max_model_len"],
        "max_num_seqs": manifest.target["max_num_seqs"],
        "trust_remote_code": settings.engine.trust_remote_code,
        "speculative_config": {"model": named, "num_speculative_tokens": 1},
        "additional_config": {
            "specdec": {"proposer_config": {"hidden_states": settings.hidden_states}},
            SETTINGS: taps,
        },
    }
    if settings.engine.tokenizer is not None:
        own["tokenizer"] = str(settings.engine.tokenizer)
    twice = sorted(own.keys() & settings.vllm.keys())
    try:
        arguments = vllm.EngineArgs(**own | settings.vllm)
    except TypeError as error:
        raise _refused(str(error), "its arguments, as vllm.EngineArgs names them") from error
    if twice:
        raise _refused(f"{', '.join(twice)}, which recording decides", "leave it out, or use the option of `record`")
    return vllm, vllm.LLMEngine.from_engine_args(arguments)


def _refused(found: str, fix: str) -> ConfigError:
    return ConfigError("SD-E280", "vLLM's engine is given what it does not take here", {"found": found, "fix": fix})


def _ends(path: str, trust_remote_code: bool) -> frozenset[int]:
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:  # a checkpoint needs none
        generation = GenerationConfig()
    return eos_token_ids(generation, config)
