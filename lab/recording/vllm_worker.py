"""What runs in vLLM's workers while it is recorded: the adapter's drafter with the taps, and a way to ask for them."""

from __future__ import annotations

from typing import Any

from safetensors.torch import save

from specdec.adapters.vllm_v1.drafter import Drafter
from specdec.core.config.sampling_params import SamplingParams

from .tap import TAP, ProbabilityTap

SETTINGS = "specdec_recording"
"""Where `additional_config` holds the arguments of `ProbabilityTap`."""

HIDDEN, LOGITS = "hidden_states", "logits"


class RecordingDrafter(Drafter):
    """vLLM's `custom_class` while it is recorded. Every request is kept until it is taken."""

    method = TAP

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        asked = vllm_config.additional_config[SETTINGS]
        self._listener = ProbabilityTap(asked["top_m"], asked["full_logits"], of_others=SamplingParams(temperature=0))
        self._prepared.hooks.add(self._listener, "record")

    def take(self, request_id: str) -> bytes:
        """What was kept of a request, as a safetensors file. Raises what went wrong in the listener."""
        if self._listener.error is not None:
            raise self._listener.error
        probabilities, logits = self._listener.take(request_id)
        states = self.driver.proposer.take(request_id)
        more = {name: each for name, each in ((HIDDEN, states), (LOGITS, logits)) if each is not None}
        saved: bytes = save({name: each.cpu().contiguous() for name, each in {**probabilities, **more}.items()})
        return saved


class RecordingWorker:
    """Added to vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def take_recorded(self, request_id: str) -> bytes:
        """Take a finished request from this worker's recording drafter."""
        recorded: bytes = self.model_runner.drafter.take(request_id)
        return recorded
