"""A replay's figures by name: those of a benchmark, and what a live run would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.proposing.speculation import SpeculativeSettings
from specdec.core.registry import PluginSettings

from ..recording import Recording
from ..result import tree_facts
from .run import Replayed, replay

Facts = dict[str, Any]


@dataclass(frozen=True)
class Replays:
    """Proposers on one recording, each replayed once."""

    recording: Recording
    plain: Replayed | None  # plain decoding; None: the recording predicts no times
    settings: Sequence[SpeculativeSettings]
    found: Sequence[Replayed]  # of each settings

    @classmethod
    def of(
        cls,
        recording: Recording,
        speculative_configs: Sequence[SpeculativeSettings],
        plugins: PluginSettings | None = None,
        *,
        model: str | Path | None = None,
        device: str = "cpu",
    ) -> Replays:
        """Replay each. Arguments and errors as of `replay`."""
        plain = replay(recording, None, plugins) if recording.manifest.cost.rows else None
        found = [replay(recording, asked, plugins, model=model, device=device) for asked in speculative_configs]
        return cls(recording, plain, speculative_configs, found)

    @cached_property
    def facts(self) -> list[Facts]:
        """The figures of each proposer."""
        plain = self.plain.predicted_seconds(self.recording) if self.plain else None
        pairs = zip(self.settings, self.found, strict=True)
        return [_facts(self.recording, asked, replayed, plain) for asked, replayed in pairs]


def _facts(recording: Recording, asked: SpeculativeSettings, replayed: Replayed, plain: float | None) -> Facts:
    acceptance, expected = replayed.acceptance, replayed.expected
    predicted = replayed.predicted_seconds(recording) if plain else None
    return {
        "proposer": replayed.proposer,
        "speculative_config": SpeculativeConfig.parse(asked).model_dump(mode="json", exclude_unset=True),
        "num_speculative_tokens": replayed.num_speculative_tokens,
        "num_requests": len(replayed.outputs),
        "num_steps": acceptance.num_steps,
        **acceptance.as_dict(),
        "conditional_acceptance_per_position": acceptance.conditional_acceptance_per_position,
        "drafted_trees": tree_facts(acceptance),
        "expected_acceptance_per_position": [list(each) for each in expected.rates()] if expected else None,
        "expected_tokens_per_step": list(expected.tokens_per_step()) if expected else None,
        "seconds": replayed.seconds,
        "propose_seconds": replayed.propose_seconds,
        "live_propose_seconds": replayed.live_propose_seconds,
        "waited_share": replayed.waited_share,
        "predicted_seconds": predicted,
        "predicted_plain_seconds": plain,
        "predicted_speedup": _speedup(plain / predicted, replayed) if plain and predicted else None,
    }


def _speedup(of_this_text: float, replayed: Replayed) -> float | list[float]:
    """Bounds where drafts are drawn: the steps of this text are counted, and live ones commit what is expected."""
    if replayed.expected is None:
        return of_this_text
    counts = replayed.acceptance
    plain = counts.num_committed_tokens - counts.num_drafts * counts.mean_acceptance_length  # of steps without a draft
    expected = (plain + counts.num_drafts * tokens for tokens in replayed.expected.tokens_per_step())
    return [of_this_text * tokens / counts.num_committed_tokens for tokens in expected]
