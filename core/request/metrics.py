"""What is counted: per request and for the engine, under vLLM's names; formulas in one place."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class RequestMetrics:
    """Acceptance of one request. A drafted step is a target step that verified at least one draft token."""

    num_steps: int = 0  # target steps that sampled
    num_drafts: int = 0  # drafted steps
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_committed_tokens: int = 0
    num_trees: int = 0  # drafted steps that verified a tree
    outcomes: Tally[tuple[int, int]] = field(default_factory=Tally)  # drafted steps by longest path, and accepted
    nodes_per_depth: Tally[int] = field(default_factory=Tally)  # of all trees, depths from 0

    def record(
        self, num_drafted: int, num_accepted: int, num_committed: int, widths: Sequence[int] | None = None
    ) -> None:
        """Count one target step. widths: the nodes of a tree at each depth. None means a chain."""
        self.num_steps += 1
        self.num_committed_tokens += num_committed
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        if widths is not None:
            self.num_trees += 1
            self.nodes_per_depth.update(dict(enumerate(widths)))
        self.outcomes[num_drafted if widths is None else len(widths), num_accepted] += 1

    def merge(self, other: RequestMetrics) -> None:
        """Add another's counts to these."""
        for each in fields(self):  # numbers and tallies
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafted steps, the recovered or bonus token included; 1 if nothing was drafted."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_target_step(self) -> float:
        """Committed tokens per target step, drafted or not; exactly 1 for plain decoding."""
        return _ratio(self.num_committed_tokens, self.num_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; the bonus token is in neither."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def acceptance_per_position(self) -> list[float]:
        """Accepted at position i / drafted steps."""
        return [_ratio(count, self.num_drafts) for count in self.accepted_per_position]

    @property
    def conditional_acceptance_per_position(self) -> list[float]:
        """Accepted at position i / drafted at i with everything before it accepted."""
        reached = self._per_position(lambda position, drafted, accepted: position < drafted and position <= accepted)
        return [_ratio(a, r) for a, r in zip(self.accepted_per_position, reached, strict=True)]

    @property
    def drafted_per_position(self) -> list[int]:
        """Draft tokens that were verified at position i."""
        return self._per_position(lambda position, drafted, accepted: position < drafted)

    @property
    def accepted_per_position(self) -> list[int]:
        """Draft tokens that were accepted at position i."""
        return self._per_position(lambda position, drafted, accepted: position < accepted)

    def _per_position(self, counts: Callable[[int, int, int], bool]) -> list[int]:
        """Drafted steps whose numbers of drafted and accepted tokens count at each position."""
        outcomes = dict(self.outcomes).items()  # copied in one call: the engine's thread may count meanwhile
        width = max((drafted for (drafted, _), _ in outcomes), default=0)
        return [
            sum(steps for (drafted, accepted), steps in outcomes if counts(position, drafted, accepted))
            for position in range(width)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The per-request object under vLLM's field names."""
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_target_step": self.tokens_per_target_step,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_per_position": self.acceptance_per_position,
            "num_target_steps": self.num_steps,
            "num_spec_steps": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
        }


@dataclass(frozen=True)
class Counter:
    """A number that only grows."""

    name: str
    value: float
    labels: dict[str, str]


@dataclass(frozen=True)
class Gauge:
    """A number that may also fall."""

    name: str
    value: float
    labels: dict[str, str]


@dataclass(frozen=True)
class Vector:
    """A counter per draft position, from position 0."""

    name: str
    values: Sequence[int]
    labels: dict[str, str]


Metric = Counter | Gauge | Vector


@dataclass
class EngineMetrics:
    """The counters of an engine, from its start."""

    model_name: str
    proposer: str
    is_profiled: bool = False  # whether the stages of steps are timed
    acceptance: RequestMetrics = field(default_factory=RequestMetrics)
    counts: Tally[str] = field(default_factory=Tally)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by stage, if profiled
    proposer_errors: Tally[str] = field(default_factory=Tally)  # by error code

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage's seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def collect(self, of_proposer: Mapping[str, float] | None = None) -> list[Metric]:
        """All metrics as flat objects; names as on a Prometheus wire, without the `_total`.

        of_proposer: figures of its own, by what follows the prefix `specdec:`.
        """
        labels = {"model_name": self.model_name, "engine": "0", "proposer": self.proposer}
        spec = "specdec:spec_decode"
        acceptance = self.acceptance
        metrics: list[Metric] = [
            Counter(f"{spec}_num_drafts", acceptance.num_drafts, labels),
            Counter(f"{spec}_num_draft_tokens", acceptance.num_draft_tokens, labels),
            Counter(f"{spec}_num_accepted_tokens", acceptance.num_accepted_tokens, labels),
            Vector(f"{spec}_num_accepted_tokens_per_pos", acceptance.accepted_per_position, labels),
            Vector(f"{spec}_num_draft_tokens_per_pos", acceptance.drafted_per_position, labels),
            Counter(f"{spec}_steps", acceptance.num_steps, labels),
            Counter(f"{spec}_steps_without_draft", acceptance.num_steps - acceptance.num_drafts, labels),
        ]
        metrics += [Counter(f"specdec:{name}", value, labels) for name, value in sorted(self.counts.items())]
        metrics += [
            Counter(f"{spec}_proposer_errors", value, labels | {"code": code})
            for code, value in sorted(self.proposer_errors.items())
        ]
        metrics += [
            Counter("specdec:step_seconds", value, labels | {"stage": stage})
            for stage, value in sorted(self.seconds.items())
        ]
        metrics += [Gauge(f"specdec:{name}", value, labels) for name, value in sorted((of_proposer or {}).items())]
        return metrics


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
