"""Builds an engine's parts from its configuration: the model, the cache, the proposer's host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from specdec.sdk.types import TargetInfo

from ..cache.block_pool import BlockPool
from ..config.engine_config import EngineConfig
from ..device_memory import spare_memory
from ..kernels.backend import Backend
from ..model.inference_form import prepare
from ..model.model_support import longest_length
from ..model.partial_target import PartialTarget
from ..model.rotary import freeze_tables
from ..model.stored_quantization import is_stored_quantised
from ..model.target import Target, TargetModel
from ..model.target_proof import TargetProof, is_wanted
from ..model.text_equality import TextEquality
from ..model.tokenizer import eos_token_ids, load_tokenizer
from ..proposing.draft_store import DistributionBuffers, DraftStore
from ..proposing.proposer_host import ProposerHost
from ..proposing.services import EngineServices
from ..proposing.speculation import SpeculativeSettings
from ..registry import PluginSettings
from ..registry.hooks import HookPlugins
from ..rejection.sampler import VerificationRule, verify, warmed_up
from ..request.metrics import EngineMetrics
from ..runner.scheduler import Scheduler, Scheduling
from ..runner.step import Runner
from .device import Working
from .memory import num_kv_blocks
from .paged_cache import PagedCache
from .plan import Plan
from .threads import Threads

StandIn = Callable[[Scheduler], tuple[Target, Scheduling, VerificationRule]]
"""What a step runs with instead of the model, from the engine's scheduler: a replay knows the model's answers."""


@dataclass(frozen=True)
class LoadedModel:
    """What is loaded from a target's checkpoint, and what follows from its size and layers."""

    target: TargetModel
    tokenizer: Any
    eos_token_ids: frozenset[int]
    threads: Threads
    text_equality: TextEquality


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
    host: ProposerHost | None
    backend: Backend
    threads: Threads
    working: Working  # what its calls happen in
    text_equality: TextEquality
    kv_capacity: int  # tokens of one request that the cache can hold


def parts_of(llm: Any) -> Parts:
    """What an `LLM` is made of. For adapters, the conformance kit and benchmarks: users are promised none of it."""
    parts: Parts = llm.engine.parts
    return parts


def assemble(config: EngineConfig, speculative_config: SpeculativeSettings, settings: PluginSettings) -> Parts:
    """Resolve and admit first, then load weights, then bind the proposer. Raises SpecdecError."""
    plan = Plan.make(config, speculative_config, settings)
    with plan.profile.current():
        return put_together(plan, load_model(plan))


def put_together(plan: Plan, model: LoadedModel, stand_in: StandIn | None = None) -> Parts:
    """The parts of a plan around a model.

    The proposer is bound and memory for drafts is taken before the cache gets what is left. stand_in: takes the model's
    place in a step. None means the model itself.
    """
    config = plan.config
    metrics = EngineMetrics(str(config.model), plan.proposer)
    passes = plan.profile.capture(config.cuda_graphs, model.target, plan.info.max_num_seqs)
    services = _services(plan, model, passes)
    drafts, rule = _verification(plan)
    host = _bound_host(plan, model, services, metrics, read_late=drafts.table is not None)
    cache = build_cache(plan, model.target)
    if services is not None and host is not None:
        services.lay_out_draft_kv(cache.num_blocks, cache.addressing)
        services.use_cache(cache.kv, cache.addressing)
        host.passes = services.passes
        with model.threads.used():
            host.warm_up()
    served: Target
    scheduler: Scheduling = cache.scheduler
    if stand_in is None:
        served = _served(plan, model, cache, passes)
    else:
        served, scheduler, rule = stand_in(cache.scheduler)
    runner = Runner(served, cache.kv, scheduler, drafts, metrics, host, config.enable_profiling, cache.addressing, rule)
    runner.on_verified = plan.hooks.observers.on_verified
    return Parts(
        info=plan.info,
        target=model.target,
        tokenizer=model.tokenizer,
        eos_token_ids=model.eos_token_ids,
        scheduler=cache.scheduler,
        drafts=drafts,
        runner=runner,
        metrics=metrics,
        hooks=plan.hooks,
        host=host,
        backend=plan.profile.backend,
        threads=model.threads,
        working=plan.profile.working(model.threads),
        text_equality=model.text_equality,
        kv_capacity=cache.num_blocks * config.block_size - plan.lookahead,
    )


def load_model(plan: Plan) -> LoadedModel:
    """Raises ConfigError, UnsupportedModelError."""
    config, profile = plan.config, plan.profile
    trusts = config.trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer, plan.path, trust_remote_code=trusts)
    target = TargetModel.load(
        plan.path, plan.hf_config, plan.dtype, profile.device, config.moe_backend, trust_remote_code=trusts
    )
    freeze_tables(target.model, plan.info.max_model_len)
    _prepare(target, plan)
    threads = profile.threads(config.num_threads, target.model)
    text_equality = profile.text_equality(target.dtype).of_target(target, profile.backend)
    if plan.speculation and plan.speculation.is_lossless:
        text_equality.tell()
    ends = eos_token_ids(target.model.generation_config, target.config)
    return LoadedModel(target, tokenizer, ends, threads, text_equality)


def _prepare(target: TargetModel, plan: Plan) -> None:
    """Bring the weights into the form that is served, and prove what they compute there.

    Quantised weights are compared with themselves. Raises UnsupportedModelError SD-E189, ConfigError SD-E192.
    """
    quantization = plan.config.quantization
    longest = longest_length(plan.info.config, target.config.attribute_map)
    quantised = quantization is not None or is_stored_quantised(plan.hf_config)
    proofs = partial(TargetProof, target, longest, quantised=quantised)
    wanted = is_wanted(target, plan.config.prove_target)
    proof = proofs() if wanted and quantization is None else None
    room, head = spare_memory(target.device), target.model.get_output_embeddings()
    prepare(target.model, quantization, plan.profile.backend, keep=head, room=room, drop=True)
    if target.mixers is not None:
        target.mixers.exchange(plan.profile.backend.recurrences())
    if wanted:
        _prove(proof or proofs(), target, plan)


def _prove(proof: TargetProof, target: TargetModel, plan: Plan) -> None:
    """In a cache that is as small as the pass."""
    info = replace(plan.info, max_num_seqs=proof.num_requests)
    num_blocks = info.max_num_seqs * -(-proof.num_tokens // info.block_size)
    pool = BlockPool(num_blocks, info.block_size, region_size=num_blocks)
    cache = PagedCache.build(plan.profile, info, target, pool, info.max_num_seqs * proof.num_tokens, lookahead=0)
    proof.check(cache.kv, cache.addressing)


def build_cache(plan: Plan, target: TargetModel) -> PagedCache:
    """As large as the configuration and the memory allow. Raises ConfigError SD-E150, SD-E178."""
    config, info, lookahead = plan.config, plan.info, plan.lookahead
    draft_kv = plan.speculation.admission.draft_kv_bytes_per_block if plan.speculation else 0
    kv_budget, recorded = plan.profile.kv_budget, plan.num_recorded_tokens
    num_drafts = plan.num_draft_tokens
    num_blocks = num_kv_blocks(config, info, target, draft_kv, kv_budget, lookahead, recorded, num_drafts)
    longest_request = -(-(info.max_model_len + lookahead) // config.block_size)
    pool = BlockPool(num_blocks, config.block_size, region_size=longest_request)
    most = config.max_num_batched_tokens
    return PagedCache.build(plan.profile, info, target, pool, most, lookahead, num_drafts)


def _services(plan: Plan, model: LoadedModel, passes: Any) -> EngineServices | None:
    """What the proposer is bound to. None means plain decoding."""
    speculation, config = plan.speculation, plan.config
    if speculation is None:
        return None
    speculation.require_cached(model.target.layer_shapes)
    return speculation.services(
        plan.info,
        model.target,
        model.tokenizer,
        plan.profile.backend,
        config.moe_backend,
        passes.function if passes else None,
        plan.compiler.CompiledFunction if plan.compiler else None,
        partial(PartialTarget, model.target),
    )


def _bound_host(
    plan: Plan, model: LoadedModel, services: EngineServices | None, metrics: EngineMetrics, *, read_late: bool
) -> ProposerHost | None:
    """The proposer, bound; the target keeps the hidden states that it needs. None means plain decoding.

    read_late: see `DraftChecker`.
    """
    speculation, device = plan.speculation, plan.profile.device
    if speculation is None or services is None:
        return None
    with model.threads.used():
        host = speculation.host(plan.info, services, metrics, plan.hooks.observers, device, read_late=read_late)
    model.target.capture(host.needs.hidden_states)
    return host


def _verification(plan: Plan) -> tuple[DraftStore, VerificationRule]:
    """Where drafts wait, and how they are verified."""
    info, device, speculation = plan.info, plan.profile.device, plan.speculation
    buffers, table = DistributionBuffers.none(), None
    rule: VerificationRule = verify
    if speculation is not None:
        buffers, rule = speculation.distribution_buffers(info, device), speculation.rule
        if plan.profile.keeps_drafts and not plan.draws_trees:  # those the host looks at
            table = speculation.draft_table(info, device)
    draft_vocab = buffers.dense.shape[2] if buffers.dense is not None else 0
    logits = torch.empty(1, info.vocab_size, dtype=plan.dtype, device=device)
    most = info.max_num_seqs, plan.num_draft_tokens, draft_vocab
    rule = warmed_up(rule, logits, *most, buffers.examples, trees=plan.draws_trees)
    return DraftStore(buffers, table, keeps_trees=plan.draws_trees), rule


def _served(plan: Plan, model: LoadedModel, cache: PagedCache, passes: Any) -> Target:
    """The target in the form that steps call: compiled where that was asked for, recorded where that is possible.

    Raises ConfigError SD-E261 where compiling was asked for that layers with a state do not take.
    """
    if plan.compiler is not None:
        with model.threads.used():  # the compiler builds their number in
            plan.compiler.compile_target(model.target, cache.kv, plan.profile.backend)
    if passes is None:
        return model.target
    num_nodes = plan.num_draft_tokens if plan.draws_trees else 0
    target: Target = passes.target(model.target, cache.kv, cache.addressing, plan.num_draft_tokens, num_nodes)
    return target
