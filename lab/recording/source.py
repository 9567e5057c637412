"""The engines whose output can be recorded (ours, transformers, vLLM), behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.device import device_of, profile_of
from specdec.core.engine.plan import target_info
from specdec.core.model.model_support import locate_model
from specdec.core.model.target import load_config
from specdec.core.model.tokenizer import load_tokenizer
from specdec.core.request.metrics import RequestMetrics

from ..conversation import Texts
from . import fingerprint
from .manifest import Cost, Manifest, plain


@dataclass(frozen=True)
class Ended:
    """A request that ended."""

    request_id: str
    token_ids: tuple[int, ...]  # [T] of output
    finish_reason: str  # "stop", "length" or "error"
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(frozen=True)
class Kept:
    """What the taps kept of a request."""

    probabilities: Mapping[str, Tensor]  # the fields of `RecordedRequest` that are probabilities
    hidden: Tensor | None  # [S, L*H]. None means that none were shown
    logits: Tensor | None  # [T, V]. None means that they were not asked for


class Source(ABC):
    """Runs a target over requests, with the taps in its steps."""

    takes_grammars = False  # whether requests may ask for structured output
    measures_cost = False  # whether `measure_cost` has figures

    manifest: Manifest  # of the target and of who runs it; the recorder adds what is recorded
    texts: Texts

    @property
    @abstractmethod
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""

    @abstractmethod
    def add(self, request_id: str, token_ids: Sequence[int], params: SamplingParams, *, kept: bool = True) -> None:
        """Queue a request. Its greedy text ends after `params.max_tokens`, or by an end of sequence.

        kept: whether the taps keep what the target says. Raises SpecdecError for what cannot be served.
        """

    @abstractmethod
    def step(self) -> Sequence[Ended]:
        """Advance. Returns the requests that ended."""

    @abstractmethod
    def take(self, request_id: str) -> Kept:
        """What was kept of a request that ended, once."""

    def measure_cost(self, prompts: Sequence[Sequence[int]]) -> Cost:
        """Measure the cost of a step on these prompts."""
        return Cost()

    @abstractmethod
    def environment(self) -> dict[str, Any]:
        """Versions and hardware."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def target_manifest(config: EngineConfig, source: str) -> tuple[Manifest, Any]:
    """What is known of a target without its weights, and its tokenizer."""
    path = locate_model(config.model)
    profile = profile_of(device_of(config.device), config.cpu_kernels)
    hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
    info = target_info(config, path, hf_config, profile.dtype(config.dtype, hf_config.dtype), profile.device)
    info = replace(info, max_num_seqs=config.max_num_seqs)
    tokenizer = load_tokenizer(config.tokenizer, path, trust_remote_code=config.trust_remote_code)
    manifest = Manifest(
        source=source,
        model=str(config.model),
        model_fingerprint=fingerprint.of_model(info.checkpoint_dir, info.config),
        tokenizer_fingerprint=fingerprint.of_tokenizer(tokenizer),
        target=plain(asdict(info) | {"config": dict(info.config)}),
        engine={"max_num_seqs": config.max_num_seqs, "max_model_len": info.max_model_len},
    )
    return manifest, tokenizer
