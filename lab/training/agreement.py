"""How often a head agrees with its target, by depth: as its trainer says, as it is served, and in the engine.

The rows lie side by side so that overfitting, and a head that is served differently from how it was trained, look
different. Every figure is conditional: of the drafts whose predecessors agreed, how many agree.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings
from specdec.core.request.metrics import RequestMetrics
from specdec.sdk import ConfigError
from specdec.sdk.json_files import read_json_file

from ..intervals import wilson
from ..recording import Recording
from ..replay.assembly import recorded_settings
from ..replay.run import Replayed, params_of, replay
from ..run import built

TRAINERS_FILE = "agreement.json"
"""In the head's folder: {"train": [of each depth], "held_out": [...]}, by the code that trained it."""


OF_TARGET = "dtype", "quantization", "moe_backend", "cpu_kernels", "tokenizer"
"""Settings of the recorded engine that decide what its target says; others are of a machine, or whom to trust."""


@dataclass(frozen=True)
class Agreement:
    """How well a head agrees with the recording: one row of the table."""

    how: str  # "trainer", "teacher-forced", "replay" or "engine"
    data: str  # "training" or "held-out"
    depths: tuple[float, ...]
    counts: tuple[tuple[int, int], ...] | None = None  # of each depth: drafts that agree, of how many; None: unknown

    @classmethod
    def of(cls, how: str, data: str, metrics: RequestMetrics) -> Agreement:
        """Counted: a depth is reached where everything before it agreed."""
        depths = range(len(metrics.accepted_per_position))
        outcomes = metrics.outcomes.items()
        reached = [
            sum(n for (drafted, agreed), n in outcomes if depth < drafted and depth <= agreed) for depth in depths
        ]
        counts = tuple(zip(metrics.accepted_per_position, reached, strict=True))
        return cls(how, data, tuple(metrics.conditional_acceptance_per_position), counts)

    @property
    def intervals(self) -> tuple[tuple[float, float], ...] | None:
        """95 % Wilson intervals of `depths`, which take drafts as independent of each other."""
        return None if self.counts is None else tuple(wilson(*each) for each in self.counts)


def head_agreement(
    train: Recording,
    held_out: Recording,
    speculative_config: SpeculativeSettings,
    plugins: PluginSettings,
    *,
    model: str | None = None,
    live: bool = True,
) -> list[Agreement]:
    """Every row that can be had. model: the target, if it lies elsewhere than when it was recorded.

    live: also run the target on the prompts of `held_out`. Raises ConfigError as `replay` and `Engine` do.
    """
    rows = _by_trainer(speculative_config)
    for data, recording in (("training", train), ("held-out", held_out)):
        replayed = replay(recording, speculative_config, plugins, model=model, teacher_forced=True)
        rows.append(Agreement.of("teacher-forced", data, _teacher_forced(recording, replayed)))
    replayed = replay(held_out, speculative_config, plugins, model=model)
    rows.append(Agreement.of("replay", "held-out", replayed.acceptance))
    if live:
        rows.append(Agreement.of("engine", "held-out", _run(held_out, speculative_config, plugins, model)))
    return rows


def _by_trainer(speculative_config: SpeculativeSettings) -> list[Agreement]:
    path = Path(SpeculativeConfig.parse(speculative_config).model or "") / TRAINERS_FILE
    if not path.is_file():
        return []
    names = {"train": "training", "held_out": "held-out"}
    try:
        said = read_json_file(path)
        return [Agreement("trainer", names[key], tuple(map(float, said[key]))) for key in names if key in said]
    except (OSError, ValueError, TypeError, OverflowError) as error:
        facts = {"because": error, "expected": '{"train": [a number for each depth], "held_out": [...]}'}
        raise ConfigError("SD-E161", f"cannot read {str(path)!r}", facts) from error


def _teacher_forced(recording: Recording, replayed: Replayed) -> RequestMetrics:
    """Count acceptance at every position of the text, with drafts that begin from the recorded states."""
    counts = RequestMetrics()
    for request in recording:
        text = (*request.token_ids, *request.past_token_ids)
        for position, step in enumerate(replayed.steps[request.request_id]):  # each commits one token
            pairs = list(zip(step.draft_token_ids, text[position:], strict=False))
            agreed = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            counts.record(len(pairs), agreed, 1 + agreed)
    return counts


def _run(
    recording: Recording, speculative_config: SpeculativeSettings, plugins: PluginSettings, model: str | None
) -> RequestMetrics:
    with closing(built(_as_recorded(recording, model), speculative_config, plugins)) as engine:
        for request in recording:
            engine.add_request(list(request.prompt_token_ids), params_of(recording, request), request.request_id)
        while engine.has_unfinished_requests:
            engine.step()
        return engine.metrics.acceptance


def _as_recorded(recording: Recording, model: str | None) -> EngineConfig:
    """The settings under which the target said what is recorded, on whatever device there is."""
    return EngineConfig(model=model or recording.manifest.model, **recorded_settings(recording, *OF_TARGET))
