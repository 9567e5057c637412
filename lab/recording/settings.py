"""What to record, and how much of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.sdk import ConfigError, StrictModel
from specdec.sdk.ranges import Limit, LimitOrZero, PositiveShare, Share, Temperature


class RecordSettings(StrictModel):
    """What to record, and how much of it. Names as in `BenchSettings`."""

    engine: EngineConfig
    dataset_name: str = "packaged"
    dataset_path: Path | None = None
    category: str | None = Field(default=None, description="None: all")
    num_prompts: LimitOrZero = Field(default=0, description="taken in turn from each category; 0: all")
    chat: bool = Field(default=False, description="put each prompt into the model's chat template")
    output_len: Limit = 128
    temperature: Temperature = 0.0
    top_k: LimitOrZero = Field(default=0, description="0: off")
    top_p: PositiveShare = 1.0
    min_p: Share = 0.0
    seed: int = Field(default=0, ge=0, lt=2**62, description="of the first request; each next one has one more")
    top_m: Limit = Field(default=20, description="likeliest tokens whose probability is kept at each position")
    hidden_states: tuple[int | Literal["final"], ...] = Field(
        default=(), description="layers, as in Needs.hidden_states"
    )
    full_logits: bool = False
    max_disk: Limit | None = Field(default=None, description="bytes; None: no limit")
    measure_cost: bool = True
    vllm: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's engine, by its names")

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of the first request."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=self.output_len,
            detokenize=False,
        )

    def refuse_sampling(self, inside: str) -> None:
        """Raise ConfigError SD-E251 unless greedy: elsewhere the draws depend on torch's generator."""
        if not self.sampling.greedy:
            facts = {"found": f"temperature {self.temperature}", "fix": "temperature 0, or record in specdec"}
            raise ConfigError("SD-E251", f"inside {inside} only greedy text is recorded", facts)
