"""Comparing proposers on a recording: no target runs, and times are predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec.core.registry import PluginSettings
from specdec.sdk import ConfigError

from ..environment import load_per_core, machine_facts, source_sha256
from ..measure import counts_of
from ..progress import NoProgress
from ..recording import Recording
from ..replay.result import Replays
from ..replay.rows import (
    has_times,
    plain_seconds,
    predicted_seconds,
    recorded_cell,
    recorded_texts,
    refuse_drawn,
    request_rows,
)
from ..replay.run import Replayed, replay
from ..result import SCHEMA_VERSION
from .table import TELL_APART, TIMED, Measured, comparison_facts, require_figure
from .variants import Variant

REPEAT = 3


def run_compare_recorded(
    folder: Path,
    variants: Sequence[Variant],
    plugins: PluginSettings,
    progress: NoProgress,
    sort: str | None,
    *,
    model: str | Path | None = None,
    device: str = "cpu",
    repeat: int = REPEAT,
    tell_apart: float = TELL_APART,
) -> dict[str, Any]:
    """Replay every variant on the recording in `folder`; the result is like `run_compare`'s.

    Replays take turns, and every second turn goes backwards, so that slow changes of the machine meet all alike. Where
    the recording predicts no times, one turn is enough. sort: None means the speed-up if the recording can predict it,
    else the tokens per step. model, device: as of `replay`. repeat: turns. tell_apart: as of
    `comparison_facts`. Raises SpecdecError: SD-E251 for drawn drafts of sampled text, SD-E252 for a sort by times that
    are unknown.
    """
    if sort is not None:
        require_figure(sort)
    recording, load = Recording.open_filled(folder), load_per_core()
    refuse_untimed(recording, sort)
    plain = plain_seconds(recording, plugins)
    by = sort or ("speedup" if plain else "tokens_per_target_step")
    once = partial(replay, recording, plugins=plugins, model=model, device=device)
    turns = _turns(once, variants, repeat if plain else 1, progress)
    return _result(recording, variants, turns, plain, by, tell_apart, load)


def compared_replays(replays: Replays, variants: Sequence[Variant]) -> dict[str, Any]:
    """The result of replays that have run, in the form of `run_compare_recorded`'s. variants: of the replays.

    Each row has the figures of its replay under "replay". Raises ConfigError SD-E251 for drawn drafts of sampled text.
    """
    recording = replays.recording
    plain = None if replays.plain is None else predicted_seconds(recording, replays.plain)
    for variant, each in zip(variants, replays.found, strict=True):
        refuse_drawn(each, variant.label)
    by = "speedup" if plain else "tokens_per_target_step"
    turns = [[each] for each in replays.found]
    result = _result(recording, variants, turns, plain, by, TELL_APART, load_per_core())
    facts = dict(zip((variant.label for variant in variants), replays.facts, strict=True))
    rows = [{**row, "replay": facts[row["label"]]} for row in result["rows"]]
    return result | {"kind": "replay", "rows": rows}


def refuse_untimed(recording: Recording, sort: str | None) -> None:
    """Raise ConfigError SD-E252 if the table is to be sorted by times that cannot be predicted."""
    if sort not in TIMED or has_times(recording):
        return
    alone = "it was recorded with several requests at a time" if recording.manifest.cost.rows else "it has no cost"
    facts = {
        "because": alone,
        "fix": "--sort tokens_per_target_step; or record without --no-cost and with --max-concurrency 1",
    }
    raise ConfigError("SD-E252", f"the recording predicts no times, and the table is to be sorted by {sort}", facts)


def _result(
    recording: Recording,
    variants: Sequence[Variant],
    turns: Sequence[Sequence[Replayed]],
    plain: Sequence[float] | None,
    by: str,
    tell_apart: float,
    load: float | None,
) -> dict[str, Any]:
    """The figures of replays. turns: of each variant. plain: plain decoding's seconds by request."""
    measured = [_measured(recording, variant, each) for variant, each in zip(variants, turns, strict=True)]
    cell = recorded_cell(recording)
    num_tokens = sum(len(request.token_ids) for request in recording)
    waited = max(each.waited_share for repeats in turns for each in repeats)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "compare",
        **cell,
        "configuration": cell["configuration"] | {"sort": by, "repeat": len(turns[0]), "times": "predicted"},
        "machine": machine_facts(load, waited),
        "baseline": {"seconds": sum(plain), "tokens_per_second": num_tokens / sum(plain)} if plain else None,
        "rows": comparison_facts(measured, [request.category for request in recording], plain, by, tell_apart),
        "token_texts": recorded_texts(recording, [each[0].steps for each in turns]),
    }


def _turns(
    once: Callable[..., Replayed], variants: Sequence[Variant], num_repeats: int, progress: NoProgress
) -> list[list[Replayed]]:
    """The replays of each variant. What a first replay does once is done before any that counts."""
    found: list[list[Replayed]] = [[] for _ in variants]
    if num_repeats > 1:
        for variant in variants:
            progress.stage(f"warming up {variant.label}")
            refuse_drawn(once(variant.speculative_config, most_requests=1), variant.label)
    for number in range(num_repeats):
        for place in range(len(variants))[:: -1 if number % 2 else 1]:
            progress.stage(f"replaying {variants[place].label} ({number + 1}/{num_repeats})")
            found[place].append(once(variants[place].speculative_config))
            refuse_drawn(found[place][-1], variants[place].label)
    return found


def _measured(recording: Recording, variant: Variant, repeats: Sequence[Replayed]) -> Measured:
    steps = repeats[0].steps
    seconds = [predicted_seconds(recording, each) for each in repeats]
    return Measured(
        variant.label,
        {**replayed_facts(variant, repeats[0]), "requests": request_rows(recording, steps)},
        [counts_of(steps[request.request_id]) for request in recording],
        None if seconds[0] is None else [each for each in seconds if each is not None],
    )


def replayed_facts(variant: Variant, replayed: Replayed) -> Mapping[str, Any]:
    """Name the proposer of a replay, its settings and its source."""
    settings = {**variant.speculative_config, "num_speculative_tokens": replayed.num_speculative_tokens}
    return {
        "proposer": replayed.proposer,
        "speculative_config": settings,
        "source_sha256": source_sha256(replayed.target),
        "outputs_equal": None,
        "replay_seconds": replayed.seconds,
    }
