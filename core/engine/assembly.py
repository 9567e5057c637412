"""Builds an engine's parts from its configuration: the model, the cache, the proposer's host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specdec.sdk import ConfigError, TargetInfo

from ..cache.kv_cache import CacheView, KVCache
from ..config.engine_config import EngineConfig
from ..kernels.cpu.attention import Span, SpanBatch
from ..kernels.cpu.backend import Backend
from ..model.compiled import CompiledFunction, compile_target
from ..model.target import Target, TargetModel
from ..model.text_equality import TextEquality
from ..model.tokenizer import eos_token_ids
from ..proposing.draft_store import DistributionBuffers, DraftStore
from ..proposing.proposer_host import ProposerHost
from ..proposing.speculation import SpeculativeSettings
from ..registry import PluginSettings
from ..registry.hooks import HookPlugins, Observers
from ..rejection import plan as plan_workspace
from ..rejection import verify
from ..rejection.rules import VerificationRule
from ..request.metrics import EngineMetrics
from ..runner.graphs import Graphs
from ..runner.scheduler import Scheduler
from ..runner.step import Runner
from .loaded_model import LoadedModel, load_model
from .paged_cache import PagedCache, build_cache
from .plan import Plan
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
    backend: Backend
    threads: Threads
    text_equality: TextEquality
    kv_capacity: int  # tokens of one request that the cache can hold


def assemble(config: EngineConfig, speculative_config: SpeculativeSettings, settings: PluginSettings) -> Parts:
    """Resolve and admit first, then load weights, then bind the proposer. Raises SpecdecError."""
    plan = Plan.make(config, speculative_config, settings)
    model = load_model(plan)
    cache = build_cache(plan, model.target)
    metrics = EngineMetrics(str(config.model), plan.proposer)
    drafts, rule = _verification(plan, cache)
    graphs = _graphs(plan)
    host = build_host(plan, model, cache, metrics, graphs, read_late=drafts.table is not None)
    served = _served(plan, model, cache, graphs)
    runner = Runner(
        served, cache.kv, cache.scheduler, drafts, metrics, host, config.enable_profiling, cache.addressing, rule
    )
    return Parts(
        info=plan.info,
        target=model.target,
        tokenizer=model.tokenizer,
        eos_token_ids=eos_token_ids(model.target),
        scheduler=cache.scheduler,
        drafts=drafts,
        runner=runner,
        metrics=metrics,
        hooks=plan.hooks,
        observers=plan.hooks.observers,
        host=host,
        backend=plan.profile.backend,
        threads=model.threads,
        text_equality=model.text_equality,
        kv_capacity=cache.num_blocks * config.block_size - plan.lookahead,
    )


def build_host(
    plan: Plan,
    model: LoadedModel,
    cache: PagedCache,
    metrics: EngineMetrics,
    graphs: Graphs | None,
    *,
    read_late: bool,
) -> ProposerHost | None:
    """The proposer, bound; the target keeps the hidden states that it needs. None means plain decoding.

    read_late: see `DraftChecker`.
    """
    speculation, config = plan.speculation, plan.config
    if speculation is None:
        return None
    services = speculation.services(
        plan.info,
        model.target,
        model.tokenizer,
        cache.num_blocks,
        cache.addressing,
        plan.profile.backend,
        config.moe_backend,
        graphs.function if graphs else None,
        CompiledFunction if config.torch_compile else None,
    )
    with model.threads.used():
        observers, device = plan.hooks.observers, plan.profile.device
        host = speculation.host(plan.info, services, metrics, observers, device, read_late=read_late)
    model.target.capture(host.needs.hidden_states)
    return host


def _verification(plan: Plan, cache: PagedCache) -> tuple[DraftStore, VerificationRule]:
    """Where drafts wait, and how they are verified."""
    info, device, speculation = plan.info, plan.profile.device, plan.speculation
    buffers, table = DistributionBuffers.none(), None
    rule: VerificationRule = verify
    if speculation is not None:
        buffers, rule = speculation.distribution_buffers(info, device), speculation.rule
        if cache.addressing.table is not None:
            table = speculation.draft_table(info, device)
    draft_vocab = buffers.dense.shape[2] if buffers.dense is not None else 0
    workspace = plan_workspace(info.max_num_seqs, plan.num_draft_tokens, info.vocab_size, device, draft_vocab)
    return DraftStore(buffers, table), partial(rule, workspace=workspace)


def _graphs(plan: Plan) -> Graphs | None:
    """None where none are wanted or the device has none. Raises ConfigError SD-E147 if they were asked for there."""
    asked, profile = plan.config.cuda_graphs, plan.profile
    if asked is False:
        return None
    if profile.recorder is None:
        if asked:
            raise ConfigError("SD-E147", f"cuda_graphs were asked for, and device {str(profile.device)!r} has none")
        return None
    return Graphs(profile.recorder(profile.device), plan.info.max_num_seqs, required=asked is True)


def _served(plan: Plan, model: LoadedModel, cache: PagedCache, graphs: Graphs | None) -> Target:
    """The target in the form that steps call: compiled where that was asked for, recorded where that is possible.

    Raises ConfigError SD-E261 where a form was asked for that layers with a state have not.
    """
    if cache.kv.states is not None:
        _refuse_fixed_forms(plan.config)
        return model.target
    if plan.config.torch_compile:
        with model.threads.used():  # the compiler builds their number in
            compile_target(model.target, partial(_vacant_view, cache.kv, plan.profile.backend))
    if graphs is None or cache.addressing.table is None:
        return model.target
    return graphs.target(model.target, cache.kv, cache.addressing.table, plan.num_draft_tokens)


def _refuse_fixed_forms(config: EngineConfig) -> None:
    """How many inputs layers with a state read again differs from step to step."""
    asked = [name for name in ("torch_compile", "cuda_graphs") if getattr(config, name)]
    if asked:
        facts = {"asked": ", ".join(asked), "fix": f"leave out {' and '.join(asked)}"}
        raise ConfigError("SD-E261", "a model whose layers keep a state is neither compiled nor recorded", facts)


def _vacant_view(cache: KVCache, backend: Backend, num_tokens: int) -> CacheView:
    """What serves a pass of so many tokens while the cache is nobody's: all in its first slot."""
    slots = torch.zeros(num_tokens, dtype=torch.int64, device=cache.device)
    return CacheView(cache, SpanBatch((Span(0, num_tokens, num_tokens, slots, cache.device),)), backend)
