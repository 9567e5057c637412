"""The engine's settings, as the user writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from specdec.sdk import StrictModel

Positive = Annotated[int, Field(ge=1)]


class EngineConfig(StrictModel):
    """Names as in vLLM. None means: derived from the model and the machine."""

    model: str | Path = Field(description="a directory, a hub id, or 'tiny' for the packaged model")
    tokenizer: str | Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, the checkpoint's own elsewhere"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    max_model_len: Positive | None = Field(None, description="prompt and output; None: the model's own limit")
    max_num_seqs: Positive = Field(64, description="requests that run at the same time")
    max_num_batched_tokens: Positive = Field(2048, description="tokens computed in one step")
    block_size: Positive = 16
    num_kv_blocks: Positive | None = Field(None, description="None: from kv_cache_memory_gib")
    kv_cache_memory_gib: float | None = Field(
        None, gt=0, description="None: a quarter of the memory that is free, at most what max_num_seqs can use"
    )
    moe_backend: str | None = Field(None, description="transformers' experts implementation; None: its default")
    quantization: str | None = Field(None, description="int8_weight_only or int8_dynamic; None: as it is stored")
    trust_remote_code: bool = Field(False, strict=True, description="run modelling code that the checkpoint brings")
    seed: int = Field(0, ge=0, lt=2**63)
    enable_profiling: bool = Field(False, description="time every stage of the step")
