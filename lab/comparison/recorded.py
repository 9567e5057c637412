"""Comparing proposers on a recording: no target runs, and times are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from specdec.core.registry import PluginSettings

from ..recording import Recording
from ..replay.rows import (
    counts_of,
    plain_seconds,
    predicted_seconds,
    recorded_cell,
    recorded_texts,
    request_rows,
    steps_of,
)
from ..replay.run import Replayed, replay
from ..result import SCHEMA_VERSION
from .table import Measured, comparison_facts
from .variants import Variant


class Stages(Protocol):
    """Who is told what begins."""

    def stage(self, name: str, num_requests: int = 0) -> None:
        """Something begins."""
        ...


def run_compare_recorded(
    folder: Path,
    variants: Sequence[Variant],
    plugins: PluginSettings,
    progress: Stages,
    sort: str | None,
    *,
    model: str | Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Replay every variant on the recording in `folder`; the result is like `run_compare`'s.

    sort: one of METRICS. None means the speed-up if the recording can predict it, else the tokens per step. model,
    device: as of `replay`. Raises SpecdecError.
    """
    recording = Recording.open(folder)
    replayed = []
    for variant in variants:
        progress.stage(f"replaying {variant.label}")
        replayed.append(replay(recording, variant.speculative_config, plugins, model=model, device=device))
    plain = plain_seconds(recording)
    by = sort or ("speedup" if plain else "tokens_per_target_step")
    measured = [_measured(recording, variant, each) for variant, each in zip(variants, replayed, strict=True)]
    cell = recorded_cell(recording)
    num_tokens = sum(len(request.token_ids) for request in recording)
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "compare",
        **cell,
        "configuration": cell["configuration"] | {"sort": by},
        "baseline": {"seconds": sum(plain), "tokens_per_second": num_tokens / sum(plain)} if plain else None,
        "rows": comparison_facts(measured, [request.category for request in recording], plain, by),
        "token_texts": recorded_texts(recording, [steps_of(each) for each in replayed]),
    }


def _measured(recording: Recording, variant: Variant, replayed: Replayed) -> Measured:
    steps = steps_of(replayed)
    return Measured(
        variant.label,
        {**replayed_facts(variant, replayed), "requests": request_rows(recording, steps)},
        [counts_of(steps[request.request_id]) for request in recording],
        predicted_seconds(recording, steps, replayed.live_propose_seconds),
    )


def replayed_facts(variant: Variant, replayed: Replayed) -> Mapping[str, Any]:
    """Who drafted, and under which settings."""
    settings = {**variant.speculative_config, "num_speculative_tokens": replayed.num_speculative_tokens}
    return {
        "proposer": replayed.proposer,
        "speculative_config": settings,
        "outputs_equal": None,
        "replay_seconds": replayed.seconds,
    }
