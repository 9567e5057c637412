"""Recording inside transformers: `model.generate` runs the target, and the taps see its steps through the adapter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specdec.adapters.transformers import speculative
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.model.model_support import locate_model
from specdec.core.model.tokenizer import eos_token_ids
from specdec.core.registry import PluginSettings

from ..conversation import Texts
from ..environment import environment
from .foreign import target_manifest
from .manifest import Manifest
from .settings import RecordSettings
from .source import Ended, Kept, Source
from .tap import TAP, ProbabilityTap

NO_END = -1  # an end of sequence that no text has


class TransformersSource(Source):
    """Runs one request after the other in transformers."""

    def __init__(self, settings: RecordSettings, plugins: PluginSettings) -> None:
        """Raises ConfigError SD-E251 for sampling, and what the adapter raises.

        Of the checkpoint's generation_config.json only the ends count: a penalty there would give another text.
        """
        settings.refuse_sampling("transformers")
        manifest, tokenizer = target_manifest(settings.engine, "transformers", "", settings.hidden_states)
        self._model = _loaded(settings, manifest)
        ends = eos_token_ids(self._model.generation_config, self._model.config)
        self._model.generation_config = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=0)
        self.manifest, self.texts = manifest.replace(eos_token_ids=tuple(sorted(ends))), Texts(tokenizer, ends)
        self._listener = ProbabilityTap(settings.top_m, settings.full_logits)
        tap = {"method": TAP, "proposer_config": {"hidden_states": settings.hidden_states}}
        self._decoding = speculative(
            self._model, tap, tokenizer=tokenizer, plugin_settings=plugins, listeners=[self._listener]
        )
        self._waiting: deque[tuple[str, Sequence[int], SamplingParams, bool]] = deque()
        self._calls = count()
        self._names: dict[str, str] = {}  # of calls, as the adapter numbers them, by request id

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting)

    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, kept: bool = True) -> None:
        self._waiting.append((request_id, token_ids, params, kept))

    def step(self) -> Sequence[Ended]:
        request_id, token_ids, params, kept = self._waiting.popleft()
        name = self._names[request_id] = str(next(self._calls))
        if kept:
            self._listener.params[name] = params
        prompt = torch.tensor([list(token_ids)], device=self._model.device)
        more = {"max_new_tokens": params.max_tokens, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        ends = {"eos_token_id": NO_END, "pad_token_id": 0} if params.ignore_eos else {}
        found = self._model.generate(prompt, custom_generate=self._decoding, **more, **ends)[0, len(token_ids) :]
        if self._listener.error is not None:
            raise self._listener.error
        output = tuple(found.tolist())
        stopped = not params.ignore_eos and output[-1] in self.texts.eos_token_ids
        if not kept:
            self._decoding.proposer.take(self._names.pop(request_id))
        return [Ended(request_id, output, "stop" if stopped else "length")]

    def take(self, request_id: str) -> Kept:
        name = self._names.pop(request_id)
        probabilities, logits = self._listener.take(name)
        return Kept(probabilities, self._decoding.proposer.take(name), logits)

    def environment(self) -> dict[str, Any]:
        return environment(self._model.device) | {"transformers": version("transformers")}

    def close(self) -> None:
        self._decoding.close()


def _loaded(settings: RecordSettings, manifest: Manifest) -> Any:
    path, trusts = locate_model(settings.engine.model), settings.engine.trust_remote_code
    dtype = getattr(torch, manifest.target["dtype"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trusts)
    return model.to(manifest.target["device"]).eval()
