"""Comparing proposers live: all engines take turns with each prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

from specdec.core.engine.verifier_checkpoint import with_verifier
from specdec.core.registry import PluginSettings

from ..dataset_files import PromptRow
from ..environment import load_per_core, machine_facts
from ..measure import Pass, TimedEngine, outputs_of, take_turns, units_of
from ..progress import NoProgress
from ..prompts import BenchPrompt, Chosen, choose
from ..result import SCHEMA_VERSION, equality_facts, request_facts, time_shares
from ..run import (
    RunSettings,
    all_differences,
    configuration_facts,
    environment_facts,
    speculation_facts,
    started,
)
from ..token_texts import token_texts
from .table import TELL_APART, Measured, comparison_facts, require_figure
from .variants import Variant

Turns = Sequence[Sequence[tuple[Pass, ...]]]  # by repeat, engine and unit; the first engine decodes plainly


def run_compare(
    settings: RunSettings,
    variants: Sequence[Variant],
    plugins: PluginSettings,
    progress: NoProgress,
    sort: str,
    *,
    tell_apart: float = TELL_APART,
    rows: Sequence[PromptRow] | None = None,
) -> dict[str, Any]:
    """Measure every variant, and plain decoding once, on the same prompts in interleaved turns.

    A turn is one unit: as many prompts of a category as run at the same time. Every engine runs a unit before the next
    unit begins, so that slow changes of the machine meet all alike. Each engine holds a target of its own. sort,
    tell_apart: as of `comparison_facts`. rows: of the data set. None means that it is read here. Returns the result as
    it is written to a file. Raises SpecdecError before anything is timed where that can be known.
    """
    require_figure(sort)
    load = load_per_core()
    model, _ = with_verifier(settings.engine.model, None)
    resolved = [with_verifier(settings.engine.model, each.speculative_config)[1] for each in variants]
    settings = settings.replace(engine=settings.engine.replace(model=model))
    rows = settings.rows(plugins) if rows is None else rows
    with ExitStack() as stack:
        engines = []
        for asked in (None, *resolved):
            progress.stage("loading")
            engines.append(started(settings.engine, asked, plugins, stack))
        plain = engines[0].engine
        chosen = choose(rows, settings.num_prompts, settings.sampling, plain, chat=settings.chat)
        units = units_of(chosen.prompts, settings.engine.max_num_seqs)
        progress.stage("measuring", len(chosen.prompts) * settings.repeat * len(engines))
        turns = take_turns(
            engines, units, num_repeats=settings.repeat, num_warmup=settings.warmup, on_finished=progress.finished
        )
        progress.stage("comparing outputs")
        facts = [
            {"speculative_config": None}
            | speculation_facts(asked, timed.engine)
            | _equality(settings, timed, chosen.prompts, turns, place)
            for place, (asked, timed) in enumerate(zip(resolved, engines[1:], strict=True), start=1)
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "compare",
            "configuration": configuration_facts(settings, plain, chosen) | {"sort": sort},
            "environment": environment_facts(plain),
            "num_prompts": len(chosen.prompts),
            "num_prompts_skipped": chosen.num_skipped,
            "machine": machine_facts(load),
            **_result(variants, facts, units, chosen, turns, sort, tell_apart),
            "token_texts": token_texts(plain.tokenizer, [each for passes in turns[0] for each in passes]),
        }


def _equality(
    settings: RunSettings, timed: TimedEngine, prompts: Sequence[BenchPrompt], turns: Turns, place: int
) -> dict[str, Any]:
    if settings.check_equal == "off":
        return equality_facts(None, len(prompts), None)
    plain, found = ([outputs_of(repeat[index]) for repeat in turns] for index in (0, place))
    differences = all_differences(timed.engine, prompts, plain, found)
    return equality_facts(differences, len(prompts), timed.engine.tokenizer)


def _result(
    variants: Sequence[Variant],
    facts: Sequence[Mapping[str, Any]],
    units: Sequence[Sequence[BenchPrompt]],
    chosen: Chosen,
    turns: Turns,
    sort: str,
    tell_apart: float,
) -> dict[str, Any]:
    """The rows of the table, and plain decoding's times beside them."""
    plain_seconds = _unit_seconds(turns, 0)
    measured = [
        Measured(
            variant.label,
            dict(facts[place - 1])
            | {"time_shares": time_shares([each for repeat in turns for each in repeat[place]])}
            | {"requests": request_facts(chosen.prompts, turns[0][place])},
            [each.acceptance for each in turns[0][place]],
            _unit_seconds(turns, place),
        )
        for place, variant in enumerate(variants, start=1)
    ]
    plain_tokens = [each.acceptance.num_committed_tokens for each in turns[0][0]]
    categories, size = [unit[0].category for unit in units], len(chosen.prompts) / len(units)
    seconds = fmean(map(sum, plain_seconds))
    return {
        "baseline": {"seconds": seconds, "tokens_per_second": sum(plain_tokens) / seconds},
        "rows": comparison_facts(measured, categories, plain_seconds, sort, tell_apart, size, plain_tokens),
    }


def _unit_seconds(turns: Turns, place: int) -> list[list[float]]:
    """The seconds of every unit, repeat by repeat."""
    return [[each.seconds for each in repeat[place]] for repeat in turns]
