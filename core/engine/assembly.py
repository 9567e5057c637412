"""Builds an engine's parts from its configuration: the model, the cache, the proposer's host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specdec.sdk.structured_outputs import Vocabulary

from ..config.engine_config import EngineConfig
from ..model.partial_target import PartialTarget
from ..model.target import Target
from ..proposing.draft_store import DistributionBuffers, DraftStore
from ..proposing.proposer_host import ProposerHost
from ..proposing.services import EngineServices, Provided
from ..proposing.speculation import Speculation, SpeculativeSettings
from ..registry import PluginSettings
from ..rejection.sampler import VerificationRule, verify, warmed_up
from ..request.metrics import EngineMetrics
from ..runner.scheduler import Scheduler, Scheduling
from ..runner.step import Runner
from .device import Working
from .grammars import Grammars
from .loaded_model import LoadedModel
from .paged_cache import PagedCache
from .plan import Plan

StandIn = Callable[[Scheduler], tuple[Target, Scheduling, VerificationRule]]
"""What a step runs with instead of the model, from the engine's scheduler: a replay knows the model's answers."""


@dataclass(frozen=True)
class Parts:
    """The parts of an engine."""

    plan: Plan
    model: LoadedModel
    cache: PagedCache
    drafts: DraftStore
    runner: Runner
    metrics: EngineMetrics
    grammars: Grammars
    host: ProposerHost | None
    working: Working  # what its calls happen in

    @property
    def kv_capacity(self) -> int:
        """Tokens of one request that the cache can hold."""
        return self.cache.scheduler.pool.num_blocks * self.plan.config.block_size - self.plan.lookahead


def parts_of(engine: Any) -> Parts:
    """What an `Engine` is made of. For the lab, the conformance kit and benchmarks: users are promised none of it."""
    parts: Parts = engine.parts
    return parts


def assemble(config: EngineConfig, speculative_config: SpeculativeSettings, settings: PluginSettings) -> Parts:
    """Resolve and admit first, then load weights, then bind the proposer. Raises SpecdecError."""
    plan = Plan.make(config, speculative_config, settings)
    with plan.profile.current(), torch.inference_mode(False):  # steps write to what is made here, in any mode
        return put_together(plan, LoadedModel.load(plan))


def put_together(plan: Plan, model: LoadedModel, stand_in: StandIn | None = None) -> Parts:
    """The parts of a plan around a model.

    The proposer is bound and memory for drafts is taken before the cache gets what is left. stand_in: takes the model's
    place in a step. None means the model itself.
    """
    config = plan.config
    proposer = plan.speculation.loaded.plugin.label if plan.speculation else "none"
    metrics = EngineMetrics(str(config.model), proposer, config.enable_profiling)
    most = plan.info.max_num_seqs, config.max_num_batched_tokens
    passes = plan.profile.capture(config.cuda_graphs, model.target.waits_for_experts, *most)
    vocabulary = Vocabulary(model.tokenizer, plan.info.vocab_size, model.eos_token_ids)
    grammars = Grammars(config.structured_outputs_backend, vocabulary, plan.plugins)
    provided = Provided(
        capture=passes.function if passes else None,
        compiling=plan.compiler.CompiledFunction if plan.compiler else None,
        own_layers=partial(PartialTarget, model.target),
        grammar_of=grammars.of,
    )
    drafts, rule = _verification(plan)
    services, host = None, None
    if plan.speculation is not None:
        read_late = drafts.table is not None
        services, host = _bound(plan, plan.speculation, model, metrics, provided, read_late=read_late)
    with host.closed_on_failure() if host else nullcontext():
        cache = PagedCache.for_requests(plan, model.target)
        if services is not None and host is not None:
            services.lay_out_draft_kv(cache.scheduler.pool.num_blocks, cache.addressing)
            services.use_cache(cache.kv, cache.addressing)
            with model.threads.used():
                host.warm_up(services.passes)
    scheduler: Scheduling = cache.scheduler
    if stand_in is None:
        served = model.served(plan, cache, passes)
    else:
        served, scheduler, rule = stand_in(cache.scheduler)
    runner = Runner(
        served,
        cache.kv,
        scheduler,
        drafts,
        metrics,
        host,
        cache.addressing,
        rule,
        on_verified=plan.hooks.observers.on_verified,
    )
    working = plan.profile.working(model.threads)
    return Parts(plan, model, cache, drafts, runner, metrics, grammars, host, working)


def _bound(
    plan: Plan,
    speculation: Speculation,
    model: LoadedModel,
    metrics: EngineMetrics,
    provided: Provided,
    *,
    read_late: bool,
) -> tuple[EngineServices, ProposerHost]:
    """What the proposer is bound to, and its host. The target keeps the hidden states that it needs.

    read_late: see `DraftChecker`.
    """
    target, tokenizer, backend = model.target, model.tokenizer, plan.profile.backend
    speculation.require_cached(target.layer_shapes)
    needs, moe_backend = speculation.loaded.needs, plan.config.moe_backend
    services = EngineServices(speculation.info, needs, target, tokenizer, backend, moe_backend, provided)
    with model.threads.used():
        host = speculation.host(services, metrics, plan.hooks.observers, plan.profile.device, read_late=read_late)
    target.capture(needs.hidden_states)
    return services, host


def _verification(plan: Plan) -> tuple[DraftStore, VerificationRule]:
    """Where drafts wait, and how they are verified."""
    info, device, speculation = plan.info, plan.profile.device, plan.speculation
    buffers, table = DistributionBuffers.none(), None
    rule: VerificationRule = verify
    if speculation is not None:
        buffers, rule = speculation.distribution_buffers(device), speculation.rule
        if plan.profile.keeps_drafts and not plan.draws_trees:  # those the host looks at
            table = speculation.draft_table(device)
    draft_vocab = buffers.dense.shape[2] if buffers.dense is not None else 0
    logits = torch.empty(1, info.vocab_size, dtype=plan.dtype, device=device)
    most = info.max_num_seqs, plan.width, draft_vocab
    rule = warmed_up(rule, logits, *most, buffers.examples, trees=plan.draws_trees)
    return DraftStore(buffers, table, keeps_trees=plan.draws_trees), rule
