"""What to record, and how much of it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specdec.core.config.sampling_params import SamplingParams
from specdec.sdk import ConfigError
from specdec.sdk.ranges import Limit, LimitOrZero, PositiveShare

from ..prompts import PromptSettings


class RecordSettings(PromptSettings):
    """What to record, and how much of it."""

    num_prompts: LimitOrZero = Field(default=0, description="taken in turn from each category; 0: all")
    top_k: LimitOrZero = Field(default=0, description="0: off")
    top_p: PositiveShare = 1.0
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
        return super().sampling.replace(top_k=self.top_k, top_p=self.top_p)

    def refuse_sampling(self, inside: str) -> None:
        """Raise ConfigError SD-E251 unless greedy: elsewhere the draws depend on torch's generator."""
        if not self.sampling.greedy:
            facts = {"found": f"temperature {self.temperature}", "fix": "temperature 0, or record in specdec"}
            raise ConfigError("SD-E251", f"inside {inside} only greedy text is recorded", facts)
