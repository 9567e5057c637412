"""Builds an engine's parts from its configuration, in the order in which each can be refused cheaply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from specdec.sdk import ConfigError, TargetInfo, UnsupportedModelError

from ..cache.addressing import Addressing
from ..cache.block_pool import BlockPool
from ..cache.device_addressing import DeviceAddressing
from ..cache.host_addressing import HostAddressing
from ..cache.kv_cache import CacheView, KVCache
from ..config.engine_config import EngineConfig
from ..device_memory import free_memory
from ..kernels.attention import Span, SpanBatch
from ..kernels.attention_spec import AttentionContext
from ..kernels.native.kernels import NativeKernels
from ..model.attention import ShapeProbe
from ..model.compiled import CompiledFunction, compile_target
from ..model.cpu_kernels import kernels_for
from ..model.inference_form import prepare_causal_lm
from ..model.loading import loading
from ..model.model_support import locate_model, longest_length
from ..model.quantization import check_quantization
from ..model.target import Target, TargetModel, experts_settings, load_config
from ..model.target_proof import TargetProof, is_wanted
from ..model.text_equality import TextEquality
from ..proposing.draft_store import DistributionBuffers, DraftStore
from ..proposing.proposer_host import ProposerHost
from ..proposing.speculation import Speculation, SpeculativeSettings
from ..registry import PluginSettings
from ..registry.hooks import HookPlugins, Observers, load_hooks
from ..rejection import plan, verify
from ..request.metrics import EngineMetrics
from ..runner.graphs import CudaRecorder, Graphs, Recorder
from ..runner.scheduler import Scheduler
from ..runner.step import Runner
from .memory import bytes_per_row, num_kv_blocks, require_memory
from .threads import Threads


@dataclass(frozen=True)
class Parts:
    """Everything an engine is made of."""

    info: TargetInfo
    target: TargetModel
    tokenizer: Any
    eos_token_ids: frozenset[int]
    scheduler: Scheduler
    drafts: DraftStore
    runner: Runner
    metrics: EngineMetrics
    hooks: HookPlugins
    observers: Observers  # those of `hooks`
    host: ProposerHost | None
    kernels: NativeKernels | None  # of a CPU
    threads: Threads
    text_equality: TextEquality
    kv_capacity: int  # tokens of one request that the cache can hold


def assemble(config: EngineConfig, speculative_config: SpeculativeSettings, settings: PluginSettings) -> Parts:
    """Resolve and admit first, then load weights, then bind the proposer. Raises SpecdecError."""
    experts_settings(config.moe_backend)
    check_quantization(config.quantization, "EngineConfig")
    path = locate_model(config.model)
    device = _device(config.device)
    kernels = kernels_for(device, config.cpu_kernels)
    hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
    dtype = _dtype(config.dtype, hf_config, device)
    info = target_info(config, path, hf_config, dtype, device)
    hooks = load_hooks(settings)
    speculation = Speculation.prepare(speculative_config, info, settings, hooks)
    per_row = bytes_per_row(config, info, speculation.loaded.needs if speculation else None)
    require_memory("max_num_seqs", config.max_num_seqs, per_row, device)
    tokenizer = _tokenizer(config, path)
    target = TargetModel.load(
        path, hf_config, dtype, device, config.moe_backend, trust_remote_code=config.trust_remote_code
    )
    _prepare(target, config, info, kernels)
    threads = Threads.choose(config.num_threads, target.model, device)
    text_equality = TextEquality.of(target, kernels)
    if speculation and speculation.is_lossless:
        text_equality.tell()
    lookahead = speculation.lookahead if speculation else 0
    num_blocks = num_kv_blocks(config, info, target, speculation.admission if speculation else None, lookahead)
    longest_request = -(-(info.max_model_len + lookahead) // config.block_size)
    pool = BlockPool(num_blocks, config.block_size, region_size=longest_request)
    scheduler = Scheduler(pool, config.max_num_seqs, config.max_num_batched_tokens, lookahead)
    addressing = ADDRESSING[device.type](scheduler, info, lookahead, kernels)
    num_cache_blocks = num_blocks + addressing.num_pad_blocks
    cache = KVCache(target.layer_shapes, num_cache_blocks, config.block_size, dtype, device)
    metrics = EngineMetrics(str(config.model), speculation.loaded.plugin.label if speculation else "none")
    distributions = speculation.distribution_buffers(info, device) if speculation else DistributionBuffers.none()
    has_table = isinstance(addressing, DeviceAddressing)
    drafts = DraftStore(distributions, speculation.draft_table(info, device) if speculation and has_table else None)
    host, graphs = None, _graphs(config, info, device)
    if speculation:
        capture = graphs.function if graphs else None
        compiling = CompiledFunction if config.torch_compile else None
        services = speculation.services(
            info, target, tokenizer, num_blocks, addressing, kernels, config.moe_backend, capture, compiling
        )
        with threads.used():
            read_late = drafts.table is not None
            host = speculation.host(info, services, metrics, hooks.observers, device, read_late=read_late)
        target.capture(host.needs.hidden_states)
    if config.torch_compile:
        with threads.used():  # the compiler builds their number in
            compile_target(target, partial(_vacant_view, cache, kernels))
    served: Target = target
    if graphs and isinstance(addressing, DeviceAddressing):
        served = graphs.target(target, cache, addressing, host.views.num_draft_tokens if host else 0)
    max_drafts = host.views.num_draft_tokens if host else 0
    draft_vocab = distributions.dense.shape[2] if distributions.dense is not None else 0
    rule = partial(
        speculation.rule if speculation else verify,
        workspace=plan(info.max_num_seqs, max_drafts, info.vocab_size, device, draft_vocab),
    )
    runner = Runner(served, cache, scheduler, drafts, metrics, host, config.enable_profiling, addressing, rule)
    return Parts(
        info=info,
        target=target,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(target),
        scheduler=scheduler,
        drafts=drafts,
        runner=runner,
        metrics=metrics,
        hooks=hooks,
        observers=hooks.observers,
        host=host,
        kernels=kernels,
        threads=threads,
        text_equality=text_equality,
        kv_capacity=num_blocks * config.block_size - lookahead,
    )


def _prepare(target: TargetModel, config: EngineConfig, info: TargetInfo, kernels: NativeKernels | None) -> None:
    """Bring the weights into the form that is served, and prove what they compute there.

    Quantised weights are compared with themselves. Raises UnsupportedModelError SD-E189, ConfigError SD-E192.
    """
    longest = longest_length(info.config, target.config.attribute_map)
    proofs = partial(TargetProof, target, longest, quantised=config.quantization is not None)
    wanted = is_wanted(target, config.prove_target)
    proof = proofs() if wanted and config.quantization is None else None
    prepare_causal_lm(target.model, config.quantization, kernels, room=free_memory(target.device) // 4)
    if wanted:
        _prove(proof or proofs(), target, replace(info, max_num_seqs=TargetProof.num_requests), kernels)


def _prove(proof: TargetProof, target: TargetModel, info: TargetInfo, kernels: NativeKernels | None) -> None:
    """In a cache that is as small as the pass; `info`: with as many requests as that has."""
    num_blocks = info.max_num_seqs * -(-proof.num_tokens // info.block_size)
    pool = BlockPool(num_blocks, info.block_size, region_size=num_blocks)
    scheduler = Scheduler(pool, info.max_num_seqs, info.max_num_seqs * proof.num_tokens, 0)
    addressing = ADDRESSING[target.device.type](scheduler, info, 0, kernels)
    blocks = num_blocks + addressing.num_pad_blocks
    proof.check(KVCache(target.layer_shapes, blocks, info.block_size, target.dtype, target.device), addressing)


def _vacant_view(cache: KVCache, kernels: NativeKernels | None, num_tokens: int) -> AttentionContext:
    """What serves a pass of so many tokens while the cache is nobody's: all in its first slot, or in no cache."""
    if kernels is None:
        return ShapeProbe()
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    return CacheView(cache, SpanBatch((Span(0, num_tokens, num_tokens, slots, cache.device),)), kernels)


def _by_lists(scheduler: Scheduler, info: TargetInfo, lookahead: int, kernels: NativeKernels | None) -> Addressing:
    return HostAddressing(scheduler, kernels)


def _by_table(scheduler: Scheduler, info: TargetInfo, lookahead: int, kernels: NativeKernels | None) -> Addressing:
    width = -(-(info.max_model_len + lookahead) // info.block_size)
    return DeviceAddressing(scheduler, info.max_num_seqs, width, torch.device(info.device))


ADDRESSING: dict[str, Callable[[Scheduler, TargetInfo, int, NativeKernels | None], Addressing]] = {
    "cpu": _by_lists,
    "cuda": _by_table,
}
"""How KV is addressed on each type of device."""


RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""What records work for replay, for each type of device that can."""


def _graphs(config: EngineConfig, info: TargetInfo, device: torch.device) -> Graphs | None:
    """None where none are wanted or the device has none. Raises ConfigError SD-E147 if they were asked for there."""
    if config.cuda_graphs is False:
        return None
    if device.type not in RECORDERS:
        if config.cuda_graphs:
            raise ConfigError("SD-E147", f"cuda_graphs were asked for, and device {str(device)!r} has none")
        return None
    return Graphs(RECORDERS[device.type](device), info.max_num_seqs, required=config.cuda_graphs is True)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("SD-E147", f"device {name!r} was asked for, and torch finds no CUDA device")
    return device


def _dtype(name: str, hf_config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    return torch.float32 if device.type == "cpu" else hf_config.dtype or torch.bfloat16


def target_info(
    config: EngineConfig, path: str, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> TargetInfo:
    """What proposers are told of a target. Raises ConfigError SD-E148 (lengths), UnsupportedModelError SD-E142."""
    facts: dict[str, Any] = hf_config.to_dict()
    longest = longest_length(facts, hf_config.attribute_map)
    max_model_len = config.max_model_len or longest
    if max_model_len is None:
        raise ConfigError("SD-E148", "the model states no longest length", {"fix": "pass max_model_len"})
    if longest is not None and max_model_len > longest:
        raise ConfigError(
            "SD-E148",
            "max_model_len is above what the model serves",
            {"asked": max_model_len, "longest": longest},
        )
    try:
        num_heads = hf_config.num_attention_heads
    except AttributeError as error:
        facts = {"model_type": hf_config.model_type, "reason": "its configuration states no number of attention heads"}
        raise UnsupportedModelError("SD-E142", "this model cannot be served as a target", facts) from error
    return TargetInfo(
        model=str(config.model),
        checkpoint_dir=Path(path) if Path(path).is_dir() else None,
        config=facts,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        num_layers=hf_config.num_hidden_layers,
        num_kv_heads=facts.get("num_key_value_heads") or num_heads,
        head_dim=facts.get("head_dim") or hf_config.hidden_size // num_heads,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        block_size=config.block_size,
    )


def _tokenizer(config: EngineConfig, path: str) -> Any:
    """The model's tokenizer, or None if its directory has none and none was asked for."""
    name = str(config.tokenizer or path)
    try:
        with loading("SD-E149", f"cannot load the tokenizer {name!r}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except ConfigError as error:
        if config.tokenizer or _has_tokenizer(path, isinstance(error.__cause__, ImportError)):
            raise
        return None
    if config.tokenizer is None and len(tokenizer) <= len(tokenizer.all_special_ids):
        return None  # what transformers makes up where there are no tokenizer files: special tokens and no others
    if not tokenizer.is_fast:
        facts = {"found": type(tokenizer).__name__, "fix": "pass token ids, or a tokenizer.json"}
        raise ConfigError("SD-E149", "the tokenizer has no tokenizer.json, which streaming needs", facts)
    return tokenizer


def _has_tokenizer(path: str, needs_library: bool) -> bool:
    """Whether the files of a tokenizer that could be used are there; `needs_library`: if it were installed."""
    directory = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json") if needs_library else ("tokenizer.json",)
    return any((directory / name).is_file() for name in names) or (needs_library and not directory.is_dir())


def _eos_token_ids(target: TargetModel) -> frozenset[int]:
    eos = target.model.generation_config.eos_token_id
    eos = target.config.to_dict().get("eos_token_id") if eos is None else eos  # some configurations have none
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)
