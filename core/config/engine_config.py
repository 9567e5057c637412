"""The engine's settings, as the user writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from specdec.sdk.config import StrictModel
from specdec.sdk.ranges import Count, Gibibytes, NaturalSeed, PositiveShare, Threads


class EngineConfig(StrictModel):
    """Names as in vLLM. None means: derived from the model and the machine."""

    model: str | Path = Field(description="a directory, a hub id, or 'tiny' for the packaged model")
    tokenizer: str | Path | None = Field(default=None, description="None: the model's")
    generation_config: str | Path = Field(
        default="auto",
        description="of requests without SamplingParams. auto: the checkpoint's generation_config.json; vllm: the "
        "defaults of SamplingParams; else a folder with such a file",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: float32 on a CPU, the checkpoint's own elsewhere"
    )
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N")
    max_model_len: Count | None = Field(default=None, description="prompt and output; None: the model's own limit")
    max_num_seqs: Count = Field(default=64, description="requests that run at the same time")
    max_num_batched_tokens: Count = Field(default=2048, description="tokens computed in one step")
    block_size: Count = Field(default=16, description="tokens of a KV block")
    num_kv_blocks: Count | None = Field(default=None, description="None: from kv_cache_memory_gib")
    kv_cache_memory_gib: Gibibytes | None = Field(
        default=None,
        description="None: on a CPU a quarter of the free memory, on a GPU what gpu_memory_utilization leaves; at most "
        "what max_num_seqs can use",
    )
    enable_prefix_caching: bool | None = Field(
        default=None,
        strict=True,
        description="requests of a namespace that begin alike compute that once, and share its KV blocks. None: where "
        "all that layers keep is in blocks, and no proposer has to see whole prompts",
    )
    moe_backend: str | None = Field(default=None, description="transformers' experts implementation; None: its default")
    quantization: str | None = Field(
        default=None, description="int8_weight_only or int8_dynamic; None: as it is stored"
    )
    trust_remote_code: bool = Field(
        default=False, strict=True, description="run modelling code that the checkpoint brings"
    )
    seed: NaturalSeed = Field(default=0, description="of requests that state none")
    gpu_memory_utilization: PositiveShare = Field(
        default=0.9, description="on a GPU: share of its memory for weights, a step's tensors and the KV cache"
    )
    cuda_graphs: bool | None = Field(
        default=None,
        strict=True,
        description="capture steps of few tokens, so that each is one launch; None: on a GPU, where that works",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        default="auto",
        description="what a CPU computes attention and linear layers with: native, kernels that the machine's C "
        "compiler builds once; torch; auto: native where that is possible",
    )
    num_threads: Threads | None = Field(
        default=None,
        description="CPU threads of a step; None: 1 for a model below 50 million weights, else PyTorch's own number; "
        "OMP_NUM_THREADS and torch.set_num_threads win over None",
    )
    torch_compile: bool = Field(
        default=False,
        strict=True,
        description="compile the target's decoder and draft networks at the start, so that no request waits. That "
        "takes a minute or two once; later starts read torch's cache",
    )
    prove_target: bool | None = Field(
        default=None,
        strict=True,
        description="at the start, compare a pass of the target as it is served with transformers' eager attention: "
        "three short passes; None: of models up to 2 billion parameters",
    )
    structured_outputs_backend: str = Field(
        default="xgrammar", min_length=1, description="what compiles grammars, by its name in specdec.grammars"
    )
    enable_profiling: bool = Field(default=False, description="time every stage of the step")
