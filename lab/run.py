"""One benchmark, from its settings to its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.engine.engine import Engine
from specdec.core.engine.verifier_checkpoint import with_verifier
from specdec.core.host import parts_of
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.sdk.ranges import Limit, LimitOrZero

from .earlier import EarlierRun
from .environment import environment, source_sha256
from .equality import Difference, compare
from .measure import Pass, TimedEngine, outputs_of, take_turns, units_of
from .progress import NoProgress
from .prompts import BenchPrompt, Chosen, PromptSettings, choose, prompts_sha256
from .result import SCHEMA_VERSION, Baseline, Timing, equality_facts, request_facts, run_facts
from .token_texts import token_texts


class RunSettings(PromptSettings):
    """What a benchmark runs on, and how often. Where `vllm bench` has a setting, the name is the same."""

    repeat: Limit = Field(default=3, description="times each prompt is measured")
    warmup: LimitOrZero = Field(default=1, description="prompts that each engine runs before anything is timed")
    check_equal: Literal["greedy", "off"] = Field(
        default="greedy", description="compare greedy outputs with plain decoding's"
    )


class BenchSettings(RunSettings):
    """What to measure, and on what."""

    speculative_config: SpeculativeSettings = Field(default=None, description="None: plain")
    baseline: Literal["auto", "off"] | Path = Field(
        default="auto", description="a path: the result of an earlier plain run"
    )

    def resolved(self) -> BenchSettings:
        """Replace a drafter's checkpoint, given as the model, by its target and its proposer."""
        model, asked = with_verifier(self.engine.model, self.speculative_config)
        return self.replace(engine=self.engine.replace(model=model), speculative_config=asked)


def run_bench(settings: BenchSettings, plugins: PluginSettings, progress: NoProgress) -> dict[str, Any]:
    """Measure, with a proposer that `plugins` lets load. Returns the result as it is written to a file.

    Raises SpecdecError before anything is timed where that can be known.
    """
    settings = settings.resolved()
    rows = settings.rows(plugins)
    earlier = EarlierRun(settings.baseline) if isinstance(settings.baseline, Path) else None
    with ExitStack() as stack:
        progress.stage("loading")
        engine = started(settings.engine, settings.speculative_config, plugins, stack)
        with_plain = settings.speculative_config is not None and settings.baseline == "auto"
        beside = [started(settings.engine, None, plugins, stack)] if with_plain else []
        chosen = choose(rows, settings.num_prompts, settings.sampling, engine.engine, chat=settings.chat)
        configuration = configuration_facts(settings, engine.engine, chosen) | speculation_facts(
            settings.speculative_config, engine.engine
        )
        machine = environment_facts(engine.engine)
        if earlier:
            earlier.refuse_unlike(configuration, machine, chosen.prompts)
        engines, units = [engine, *beside], units_of(chosen.prompts)
        progress.stage("measuring", len(chosen.prompts) * settings.repeat * len(engines))
        turns = take_turns(
            engines, units, num_repeats=settings.repeat, num_warmup=settings.warmup, on_finished=progress.finished
        )
        repeats, *plain = zip(*turns, strict=True)
        baseline, expected = _reference(earlier, plain, settings.repeat)
        differences = None
        if baseline and settings.check_equal != "off":
            progress.stage("comparing outputs")
            differences = all_differences(engine.engine, chosen.prompts, expected, list(map(outputs_of, repeats)))
    return {
        "schema_version": SCHEMA_VERSION,
        "configuration": configuration,
        "environment": machine,
        "num_prompts": len(chosen.prompts),
        "num_prompts_skipped": chosen.num_skipped,
        **run_facts(repeats, baseline),
        "proposer_figures": own_figures(engine.engine),
        **equality_facts(differences, len(chosen.prompts), engine.engine.tokenizer),
        "requests": request_facts(chosen.prompts, repeats[0]),
        "token_texts": token_texts(engine.engine.tokenizer, repeats[0]),
    }


def started(config: EngineConfig, asked: SpeculativeSettings, plugins: PluginSettings, stack: ExitStack) -> TimedEngine:
    """An engine to be timed, which `stack` closes."""
    timed = TimedEngine(partial(built, config, asked, plugins))
    assert asked is not None or parts_of(timed.engine).host is None, "others are compared with plain decoding"
    return stack.enter_context(closing(timed))


def built(config: EngineConfig, asked: SpeculativeSettings, plugins: PluginSettings) -> Engine:
    """An engine whose proposer begins with its saved state, if there is one, and never writes it: repeats are alike."""
    engine = Engine(config, asked, plugins)
    host = parts_of(engine).host
    if host is not None:
        host.saves_state = False
    return engine


def own_figures(engine: Engine) -> dict[str, float]:
    """What the proposer publishes of itself, since its engine was built."""
    host = parts_of(engine).host
    engine.get_metrics()
    return dict(host.own_metrics) if host else {}


SAID_ELSEWHERE = {"model", "dtype", "device", "max_model_len", "max_num_seqs", "num_threads", "enable_profiling"}
"""Settings of an engine that a result has under a name of their own, as the engine came to them."""


def configuration_facts(settings: RunSettings, engine: Engine, chosen: Chosen) -> dict[str, Any]:
    """The settings that a result names beside the proposer, and what the engine made of them."""
    info = parts_of(engine).plan.info
    return {
        "model": str(settings.engine.model),
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "max_concurrency": settings.engine.max_num_seqs,
        "text_equality": asdict(engine.text_equality),
        "prefix_caching": engine.prefix_caching.enabled,
        "profile": settings.engine.enable_profiling,
        "prompts_sha256": prompts_sha256(chosen.prompts),
        "engine": settings.engine.model_dump(mode="json", exclude_defaults=True, exclude=SAID_ELSEWHERE),
        **settings.model_dump(mode="json", exclude={"engine", "speculative_config"}),
    }


def speculation_facts(asked: SpeculativeSettings, engine: Engine) -> dict[str, Any]:
    """Which proposer the engine has, and its settings with the draft length that it came to."""
    host = parts_of(engine).host
    if host is None:
        return {"proposer": None, "speculative_config": None, "source_sha256": None}
    settings = SpeculativeConfig.parse(asked).replace(num_speculative_tokens=host.loaded.config.num_draft_tokens)
    return {
        "proposer": str(host.plugin),
        "speculative_config": settings.model_dump(mode="json", exclude_unset=True),
        "source_sha256": source_sha256(host.plugin.target),
    }


def environment_facts(engine: Engine) -> dict[str, Any]:
    """The machine, and the threads that the engine uses."""
    parts = parts_of(engine)
    return environment(parts.model.target.device) | {"threads": parts.model.threads.count}


def _reference(
    earlier: EarlierRun | None, plain: Sequence[Sequence[Sequence[Pass]]], num_repeats: int
) -> tuple[Baseline | None, Sequence[Mapping[str, tuple[int, ...]]]]:
    """Times and outputs of plain decoding for each repeat. plain: what ran beside it, if anything did."""
    if earlier:
        return Baseline(earlier.timing, paired=False), [earlier.outputs] * num_repeats
    if not plain:
        return None, ()
    return Baseline(Timing.of(plain[0]), paired=True), list(map(outputs_of, plain[0]))


def all_differences(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    plain: Sequence[Mapping[str, tuple[int, ...]]],
    found: Sequence[Mapping[str, tuple[int, ...]]],
) -> list[Difference]:
    """For each prompt whose output differed in some repeat, the difference in the first such repeat."""
    seen: dict[str, Difference] = {}
    for expected, outputs in zip(plain, found, strict=True):
        rest = {prompt.prompt_id: prompt.token_ids for prompt in prompts if prompt.prompt_id not in seen}
        seen |= {difference.prompt_id: difference for difference in compare(engine, rest, expected, outputs)}
    return list(seen.values())
