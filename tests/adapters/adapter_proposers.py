"""Proposers that the tests of the adapters name by class path."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import ClassVar

import torch

from specdec.plugins.eagle.proposer import Eagle3Proposer
from specdec.plugins.forced import ForcedProposer
from specdec.plugins.ngram import NgramProposer
from specdec.sdk import (
    DistributionKind,
    Draft,
    DraftDistribution,
    LateProposer,
    Needs,
    ProposerConfig,
    RequestView,
    StepView,
    StrictModel,
    TargetInfo,
)
from specdec.sdk.combinators import Chain
from specdec.sdk.extensions import Metrics, Trees
from specdec.sdk.trees import draw_siblings


class EndsOnce(NgramProposer):
    """N-grams, until its process kills itself in its second step with drafts. The file that says so ends with it."""

    class Options(NgramProposer.Options):
        """`file`: is there while it is to do that."""

        file: str

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self._file, self._num_steps = Path(config.options.file), 0

    def propose(self, step: StepView) -> Draft:
        self._num_steps += 1
        if self._num_steps == 2 and self._file.exists():
            self._file.unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().propose(step)


class KnowsTheText(LateProposer):
    """A service with latency that knows what is generated."""

    class Options(LateProposer.Options):
        """`file`: holds the whole texts, as token ids. `latency_ms`: of every answer."""

        file: str
        latency_ms: float = 0.0

    def ask(self, request, tokens, k):
        time.sleep(self.config.options.latency_ms / 1000)
        texts = json.loads(Path(self.config.options.file).read_text())
        return next((text[len(tokens) :][:k] for text in texts if text[: len(tokens)] == tokens), [])


class LookUpThenHead(Chain):
    """A combinator of a host proposer and one with hidden states and draft KV."""

    parts = (NgramProposer, Eagle3Proposer)


class ForcedThenLookUp(Chain):
    """Drafts what a grammar forces, and else looks it up."""

    parts = (ForcedProposer, NgramProposer)


class ForcedThenHead(Chain):
    """Drafts what a grammar forces, and else asks a head."""

    parts = (ForcedProposer, Eagle3Proposer)


class Silent:
    """Never drafts."""

    def __init__(self, config: ProposerConfig) -> None: ...

    def propose(self, step: StepView) -> Draft:
        return Draft.from_lists([()] * len(step), step.width)


class Told(Silent):
    """Never drafts, and remembers what requests told it."""

    options: ClassVar[list[tuple[str, ...]]] = []

    class RequestOptions(StrictModel):
        """Where nobody gives any, it has this."""

        language: str = "any"

    def on_start(self, request: RequestView[RequestOptions]) -> None:
        self.options.append((request.request_id, request.options.language))


class Counting:
    """Drafts 0, 1, 2, ...: seldom right."""

    def __init__(self, config: ProposerConfig) -> None: ...

    def propose(self, step: StepView) -> Draft:
        return Draft.from_lists([range(budget) for budget in step.budget.tolist()], step.width)


class NotesCalls(Counting):
    """Notes which of its methods are called, for all its objects."""

    needs = Needs(extensions=(Metrics(),))
    calls: ClassVar[list[str]] = []

    def propose(self, step: StepView) -> Draft:
        self.calls.append("propose")
        return super().propose(step)

    def metrics(self) -> dict[str, float]:
        self.calls.append("metrics")
        return {"calls": len(self.calls)}

    def close(self) -> None:
        self.calls.append("close")


class NotesStarts(Counting):
    """Notes where the kept tokens of each step begin."""

    seen: ClassVar[list[int]] = []

    def observe(self, step: StepView) -> None:
        self.seen.extend(step.kept.kept_start.tolist())


class NotesStartsOfWhole(NotesStarts):
    """The same, and asks for whole prompts."""

    needs = Needs(whole_prompt=True)


class Drawn:
    """Draws from a fixed distribution that is not the target's, and reports it."""

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        cls.vocab_size = target.vocab_size
        return Needs(distributions=("dense",), sampling=("temperature", "top_k", "top_p", "min_p"))

    def __init__(self, config: ProposerConfig) -> None:
        self.distribution = torch.arange(1.0, self.vocab_size + 1).softmax(0)

    def propose(self, step: StepView) -> Draft:
        k = step.width
        uniforms = torch.stack([step.random.uniform(index) for index in range(k)], dim=1)
        ids = torch.searchsorted(self.distribution.cumsum(0).double(), uniforms).clamp(max=self.vocab_size - 1)
        return Draft(ids, step.budget, distribution=self.report(len(step), k))

    def report(self, num_requests: int, num_rows: int) -> DraftDistribution:
        """Of all rows alike."""
        kind = torch.full((num_requests,), int(DistributionKind.DENSE_PROBS), dtype=torch.uint8)
        return DraftDistribution(kind=kind, probs=self.reported().expand(num_requests, num_rows, -1))

    def reported(self) -> torch.Tensor:
        """[V]: the truth."""
        return self.distribution


class DrawnOnDevice(Drawn):
    """Keeps its drafts where they are made."""

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return super().needs(config, target).replace(placement="device")


class Lying(Drawn):
    """Draws from another distribution than it reports."""

    def reported(self) -> torch.Tensor:
        """The likeliest tokens are the least likely."""
        return self.distribution.flip(0)


class Modest(Drawn):
    """Draws from a sharper distribution than it reports, where every token is possible."""

    def reported(self) -> torch.Tensor:
        """Three quarters of it are even."""
        return 0.25 * self.distribution + 0.75 / self.vocab_size


class DrawnTree(Drawn):
    """Draws two siblings without replacement, and a child below the one with the larger token."""

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return super().needs(config, target).replace(extensions=(Trees(),))

    def propose(self, step: StepView) -> Draft:
        uniforms = torch.stack([step.random.uniform(index) for index in range(3)], dim=1)
        siblings = draw_siblings(self.distribution.expand(len(step), -1), uniforms[:, :2])
        child = draw_siblings(self.distribution.expand(len(step), -1), uniforms[:, 2:])
        parents = torch.stack([torch.full((len(step),), -1)] * 2 + [siblings.argmax(dim=1)], dim=1)
        told = self.report(len(step), 3)
        return Draft(torch.cat([siblings, child], dim=1), step.budget.clamp(max=3), distribution=told, parents=parents)


class NoTree(Silent):
    """Its second node hangs from a later one."""

    needs = Needs(extensions=(Trees(),))

    def propose(self, step: StepView) -> Draft:
        return Draft.from_trees([[(-1, 1), (3, 2)][:budget] for budget in step.budget.tolist()], step.width)


class LyingTree(DrawnTree, Lying):
    """Draws from another distribution than it reports."""


class Watching:
    """Keeps what it was shown of the sampling parameters and the hidden states."""

    seen: ClassVar[list[tuple[float, ...]]] = []
    hidden: ClassVar[list[torch.Tensor]] = []

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return Needs(
            sampling=("temperature", "top_k", "top_p", "min_p"), hidden_states=(0, 2, target.num_layers, "final")
        )

    def __init__(self, config: ProposerConfig) -> None: ...

    def observe(self, step: StepView) -> None:
        given = step.sampling
        values = (given.temperature, given.top_k, given.top_p, given.min_p)
        Watching.seen.append(tuple(round(float(value), 4) for value in values))
        Watching.hidden.append(step.kept.hidden_cat().clone())

    def propose(self, step: StepView) -> Draft:
        return Draft.from_lists([[7] * budget for budget in step.budget.tolist()], step.width)


class Failing(Silent):
    """Raises when it is asked."""

    def propose(self, step: StepView) -> Draft:
        raise RuntimeError("no idea")
