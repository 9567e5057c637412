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
    tokenizer: str | Path | None = Field(None, description="None: the model's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, the checkpoint's own elsewhere"
    )
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    max_model_len: Positive | None = Field(None, description="prompt and output; None: the model's own limit")
    max_num_seqs: Positive = Field(64, description="requests that run at the same time")
    max_num_batched_tokens: Positive = Field(2048, description="tokens computed in one step")
    block_size: Positive = Field(16, description="tokens of a KV block")
    num_kv_blocks: Positive | None = Field(None, description="None: from kv_cache_memory_gib")
    kv_cache_memory_gib: float | None = Field(
        None,
        gt=0,
        description="None: on a CPU a quarter of the free memory, on a GPU what gpu_memory_utilization leaves; at most "
        "what max_num_seqs can use",
    )
    moe_backend: str | None = Field(None, description="transformers' experts implementation; None: its default")
    quantization: str | None = Field(None, description="int8_weight_only or int8_dynamic; None: as it is stored")
    trust_remote_code: bool = Field(False, strict=True, description="run modelling code that the checkpoint brings")
    seed: int = Field(0, ge=0, lt=2**63, description="of requests that state none")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="on a GPU: share of its memory for weights, a step's tensors and the KV cache"
    )
    cuda_graphs: bool | None = Field(
        None, strict=True, description="record steps of few tokens and replay them; None: on a GPU, where that works"
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="what a CPU computes attention and linear layers with: native, kernels that the machine's C "
        "compiler builds once; torch; auto: native where that is possible",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of a step; None: 1 for a model below 50 million weights, else PyTorch's own number; "
        "OMP_NUM_THREADS and torch.set_num_threads win over None",
    )
    torch_compile: bool = Field(
        False,
        strict=True,
        description="compile the target's decoder, at the start, and draft networks, at their first passes; that takes "
        "a minute once, later starts read torch's cache",
    )
    enable_profiling: bool = Field(False, description="time every stage of the step")
