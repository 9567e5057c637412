"""Proposers for tests, named by class path: they know the truth, lie on purpose, record, or fail."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.sdk import (
    DistributionKind,
    Draft,
    DraftDistribution,
    HostProposer,
    Needs,
    ProposerConfig,
    RequestView,
    StepView,
    StrictModel,
    TargetInfo,
)
from specdec.sdk.extensions import State, Trees

VOCAB_SIZE = 4096


def ragged_length(position: int, budget: int) -> int:
    """A draft length in 0 .. budget that looks random but depends on the position alone."""
    return (position * 7919 >> 3) % (budget + 1)


def is_wrong(position: int, wrong_every: int) -> bool:
    """Whether a scripted draft token for this position differs from the truth."""
    return wrong_every > 0 and position % wrong_every == 0


class Scripted:
    """Drafts the known continuation of each prompt, wrong at every `wrong_every`-th position, 1: always wrong."""

    needs = Needs()

    class Options(StrictModel):
        sequences: tuple[tuple[int, ...], ...] = ()  # prompts with their continuations
        wrong_every: int = 0
        ragged: bool = False  # lengths from `ragged_length` instead of the whole budget
        vocab_size: int = VOCAB_SIZE

    def __init__(self, config: ProposerConfig) -> None:
        self.config = config
        self.options: Scripted.Options = config.options or self.Options()
        self.known: dict[str, tuple[int, ...]] = {}

    def on_start(self, request: RequestView) -> None:
        prompt = tuple(request.prompt_token_ids)
        known = [seq for seq in self.options.sequences if seq[: len(prompt)] == prompt]
        self.known[request.request_id] = known[0] if known else ()

    def on_finish(self, request: RequestView) -> None:
        self.known.pop(request.request_id, None)

    def propose(self, step: StepView) -> Draft:
        columns = (step.request_ids, step.committed_length.tolist(), step.budget.tolist())
        return Draft.from_lists([self.draft(*facts) for facts in zip(*columns, strict=True)], step.width)

    def draft(self, request_id: str, length: int, budget: int) -> list[int]:
        count = ragged_length(length, budget) if self.options.ragged else budget
        known = self.known.get(request_id, ())
        return [self.token(known, position) for position in range(length, length + count)]

    def token(self, known: tuple[int, ...], position: int) -> int:
        vocab_size = self.options.vocab_size
        right = known[position] if position < len(known) else position % vocab_size
        return (right + 1) % vocab_size if is_wrong(position, self.options.wrong_every) else right


class Noise(Scripted):
    """Ids without any plan, as many as the budget allows."""

    def token(self, known: tuple[int, ...], position: int) -> int:
        return position * 2654435761 % VOCAB_SIZE


TOP_M = 8


@cache
def noise_distribution(number: int) -> Tensor:
    """One of a few pseudo-random distributions [V]."""
    return (2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(number))).softmax(0)


class DenseDistributions(Scripted):
    """Draws its drafts from distributions that depend on the position alone, with `step.random`, and reports those
    distributions.

    `reported` keeps, by (request id, committed length), kind, drafted tokens and distributions [n, V].
    """

    class Options(Scripted.Options):
        kind: str = "probs"  # or "logits", or "mixed": by the committed length one-hot, probs or logits

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return Needs(distributions=("dense",))

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.reported: dict[tuple[str, int], tuple[DistributionKind, list[int], Tensor]] = {}

    def kind_of(self, length: int) -> DistributionKind:
        kinds = {
            "probs": DistributionKind.DENSE_PROBS,
            "logits": DistributionKind.DENSE_LOGITS,
            "sparse": DistributionKind.SPARSE,
        }
        if self.options.kind != "mixed":
            return kinds[self.options.kind]
        return (DistributionKind.ONE_HOT, DistributionKind.DENSE_PROBS, DistributionKind.DENSE_LOGITS)[length % 3]

    def distribution(self, known: tuple[int, ...], position: int) -> Tensor:
        """Probabilities [V]: half of the mass on what is known to follow, the rest pseudo-random."""
        distribution = 0.5 * noise_distribution(position % 16)
        distribution[self.token(known, position)] += 0.5
        return distribution

    def distributions_of(self, step: StepView, b: int, length: int, budget: int) -> list[Tensor]:
        known = self.known[step.request_ids[b]]
        return [self.distribution(known, length + i) for i in range(budget)]

    def propose(self, step: StepView) -> Draft:
        shape = (len(step), step.width)
        token_ids = torch.full(shape, -1)
        probs, kinds = torch.zeros(*shape, VOCAB_SIZE), []
        for b, (length, budget) in enumerate(zip(step.committed_length.tolist(), step.budget.tolist(), strict=True)):
            kinds.append(self.kind_of(length))
            for i, distribution in enumerate(self.distributions_of(step, b, length, budget)):
                uniform = step.random.uniform(i)[b]
                cdf = distribution.cumsum(0, dtype=torch.float64)
                token_ids[b, i] = int(torch.searchsorted(cdf, uniform * cdf[-1]))
                probs[b, i] = distribution
            self.reported[step.request_ids[b], length] = (
                kinds[-1],
                token_ids[b, :budget].tolist(),
                probs[b, :budget].clone(),
            )
        return Draft(token_ids, step.budget.clone(), distribution=self.draft_distribution(kinds, probs))

    def draft_distribution(self, kinds: list[DistributionKind], probs: Tensor) -> DraftDistribution:
        present, kind = set(kinds), torch.tensor(kinds, dtype=torch.uint8)
        dense = probs if DistributionKind.DENSE_PROBS in present else None
        logits = probs.log() if DistributionKind.DENSE_LOGITS in present else None
        return DraftDistribution(kind=kind, probs=dense, logits=logits)


class SparseDistributions(DenseDistributions):
    """The same with distributions of a few entries."""

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return Needs(distributions=("sparse",), sparse_top_m=TOP_M)

    def distribution(self, known: tuple[int, ...], position: int) -> Tensor:
        top = super().distribution(known, position).topk(TOP_M)
        return torch.zeros(VOCAB_SIZE).index_copy_(0, top.indices, top.values / top.values.sum())

    def draft_distribution(self, kinds: list[DistributionKind], probs: Tensor) -> DraftDistribution:
        top = probs.topk(TOP_M)
        ids = torch.where(top.values > 0, top.indices, -1)
        return DraftDistribution(kind=torch.tensor(kinds, dtype=torch.uint8), sparse_ids=ids, sparse_probs=top.values)


@dataclass
class Shown:
    """What one step showed of one request, copied."""

    request_id: str
    row: int
    generation: int
    phase: int
    committed_length: int
    newest_token: int
    num_drafted: int
    num_accepted: int
    budget: int
    kept_start: int
    num_kept: int
    positions: list[int]
    token_ids: list[int]
    next_token_ids: list[int]
    hidden: Tensor | None
    history: list[int] | None
    uniforms: list[float]
    sampling: dict[str, float]


class Recorder(Scripted):
    """Keeps a copy of everything that it is shown: `steps`, one list of `Shown` each, and lifecycle `events`."""

    class Options(Scripted.Options):
        placement: str = "host"
        hidden_states: tuple[int | str, ...] = ()
        history: bool = False
        sampling: tuple[str, ...] = ()
        min_draft_tokens: int = 0
        distributions: tuple[str, ...] = ()

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return Needs(**config.options.model_dump(include=set(Needs.model_fields)))

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.steps: list[list[Shown]] = []
        self.events: list[tuple[str, str]] = []
        self.budgets_asked: list[list[int]] = []
        self.rows_at_finish: dict[str, int] = {}
        self.max_k = config.num_draft_tokens

    def bind(self, target: TargetInfo, services: object) -> None:
        self.events.append(("bind", target.model))

    def warmup(self) -> None:
        self.events.append(("warmup", ""))

    def on_start(self, request: RequestView) -> None:
        super().on_start(request)
        self.events.append(("on_start", request.request_id))

    def on_preempt(self, request: RequestView) -> None:
        self.events.append(("on_preempt", request.request_id))

    def on_finish(self, request: RequestView) -> None:
        super().on_finish(request)
        self.events.append(("on_finish", request.request_id))
        self.rows_at_finish[request.request_id] = request.slot

    def close(self) -> None:
        self.events.append(("close", ""))

    def observe(self, step: StepView) -> None:
        self.steps.append([self.shown(step, b) for b in range(len(step))])

    def propose(self, step: StepView) -> Draft:
        self.budgets_asked.append(step.budget.tolist())
        return super().propose(step)

    def shown(self, step: StepView, b: int) -> Shown:
        kept, names = step.kept, ("slots", "generation", "phase", "committed_length", "newest_token")
        row, generation, phase, length, newest = (int(getattr(step, name)[b]) for name in names)
        count = int(kept.num_kept[b])
        mine = slice(int(kept.token_offsets[b]), int(kept.token_offsets[b]) + count)
        return Shown(
            request_id=step.request_ids[b],
            row=row,
            generation=generation,
            phase=phase,
            committed_length=length,
            newest_token=newest,
            num_drafted=int(step.num_drafted[b]),
            num_accepted=int(step.num_accepted[b]),
            budget=int(step.budget[b]),
            kept_start=int(kept.kept_start[b]),
            num_kept=count,
            positions=kept.positions[mine].tolist(),
            token_ids=kept.token_ids[mine].tolist(),
            next_token_ids=kept.next_token_ids[mine].tolist(),
            hidden=kept.hidden_cat()[mine].clone() if kept.hidden else None,
            history=None if step.history is None else step.history.token_ids(b),
            uniforms=[float(step.random.uniform(i)[b]) for i in range(self.max_k)],
            sampling={name: float(getattr(step.sampling, name)[b]) for name in self.options.sampling},
        )


class Echo(HostProposer):
    """Drafts the text's own ending once more; keeps the tokens that `draft` was given, in order."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.given: list[tuple[int, ...]] = []

    def draft(self, request: RequestView, tokens: Sequence[int], k: int) -> Sequence[int]:
        self.given.append(tuple(tokens))
        return tokens[-k:]


class Peeker(Scripted):
    """Declares nothing, and notes which optional fields are there all the same."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.seen: list[tuple[object, object, object]] = []

    def observe(self, step: StepView) -> None:
        self.seen.append((step.history, step.sampling, step.kept.hidden))


class Forgetful(DenseDistributions):
    """Reports distributions and keeps no record of them."""

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        self.reported.clear()
        return draft


class Faulty(Recorder):
    """Does something wrong in one method: raises, or has `propose` return what is no draft for the step."""

    class Options(Recorder.Options):
        where: str
        fault: str = "raise"
        after: int = 0  # calls of the method that go well before
        times: int = 1_000_000

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        return super().needs(config, target).replace(extensions=(State(),))

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.num_calls: Counter[str] = Counter()
        self.fault = self.options.fault
        self.trip("__init__")

    def arm(self, fault: str) -> None:
        """Start over with another fault."""
        self.num_calls.clear()
        self.fault = fault

    def trip(self, method: str) -> bool:
        """Raise if it is this method's turn to; otherwise whether it is its turn to do something else wrong."""
        options = self.options
        turn = self.num_calls[method]
        self.num_calls[method] += 1
        due = method == options.where and options.after <= turn < options.after + options.times
        if due and self.fault == "raise":
            raise RuntimeError(f"{method} fails on purpose")
        if due and self.fault == "exit":
            raise SystemExit(3)
        if due and self.fault == "raise without a text":
            raise Textless
        return due

    def bind(self, target: TargetInfo, services: object) -> None:
        super().bind(target, services)
        self.trip("bind")

    def warmup(self) -> None:
        super().warmup()
        self.trip("warmup")

    def on_start(self, request: RequestView) -> None:
        super().on_start(request)
        self.trip("on_start")

    def observe(self, step: StepView) -> None:
        self.trip("observe")
        super().observe(step)

    def on_preempt(self, request: RequestView) -> None:
        super().on_preempt(request)
        self.trip("on_preempt")

    def on_finish(self, request: RequestView) -> None:
        super().on_finish(request)
        self.trip("on_finish")

    def save(self, path: Path) -> None:
        self.trip("save")

    def load(self, path: Path) -> None:
        self.trip("load")

    def close(self) -> None:
        super().close()
        self.trip("close")

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        return (WRONG | ODD)[self.fault](draft, step) if self.trip("propose") else draft


class Textless(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise KeyError("text")


def _sleeping(draft: Draft, step: StepView) -> Draft:
    time.sleep(0.01)
    return draft


def _writing(draft: Draft, step: StepView) -> Draft:
    step.committed_length.zero_()
    return draft


def _yielding(draft: Draft, step: StepView) -> Iterator[Draft]:
    yield draft


def _with_ids(draft: Draft, step: StepView, token_id: int) -> Draft:
    return Draft(torch.full_like(draft.token_ids, token_id), step.budget.clone())


def _with_distribution(draft: Draft, kind: int, **tensors: object) -> Draft:
    kinds = torch.full(draft.lengths.shape, kind, dtype=torch.uint8)
    return Draft(draft.token_ids, draft.lengths, distribution=DraftDistribution(kind=kinds, **tensors))


def _uniform_distribution(draft: Draft) -> Tensor:
    return torch.full((*draft.token_ids.shape, VOCAB_SIZE), 1 / VOCAB_SIZE)


def _with_probs(draft: Draft, change: Callable[[Tensor], Tensor]) -> Draft:
    return _with_distribution(draft, DistributionKind.DENSE_PROBS, probs=change(_uniform_distribution(draft)))


def signs(probs: Tensor) -> Tensor:
    """Alternately -0.1 and 0.1 along the vocabulary."""
    return 0.1 * (2 * (torch.arange(probs.shape[-1]) % 2) - 1)


WRONG: dict[str, Callable[[Draft, StepView], object]] = {
    "nothing": lambda draft, step: None,
    "a list": lambda draft, step: [[1, 2]] * len(step),
    "a generator": _yielding,
    "a class": lambda draft, step: Draft,
    "lists in a draft": lambda draft, step: Draft(draft.token_ids.tolist(), draft.lengths.tolist()),
    "a transposed draft": lambda draft, step: Draft(draft.token_ids.T, draft.lengths),
    "a flat draft": lambda draft, step: Draft(draft.token_ids.flatten(), draft.lengths),
    "a row too few": lambda draft, step: Draft(draft.token_ids[1:], draft.lengths[1:]),
    "a column too many": lambda draft, step: Draft(pad(draft.token_ids, (0, 1)), draft.lengths),
    "ids as floats": lambda draft, step: Draft(draft.token_ids.float(), draft.lengths),
    "a huge draft": lambda draft, step: Draft(torch.zeros(len(step), 100_000, dtype=torch.int64), draft.lengths),
    "ids on another device": lambda draft, step: Draft(draft.token_ids.to("meta"), draft.lengths),
    "lengths as floats": lambda draft, step: Draft(draft.token_ids, draft.lengths.float()),
    "lengths as bools": lambda draft, step: Draft(draft.token_ids, draft.lengths.bool()),
    "a negative length": lambda draft, step: Draft(draft.token_ids, draft.lengths - 100),
    "a length over the budget": lambda draft, step: Draft(draft.token_ids, step.budget + 1),
    "lengths without end": lambda draft, step: Draft(draft.token_ids, torch.full_like(draft.lengths, 2**62)),
    "an id over the vocabulary": lambda draft, step: _with_ids(draft, step, VOCAB_SIZE),
    "padding within the length": lambda draft, step: _with_ids(draft, step, -1),
    "a sentinel within the length": lambda draft, step: _with_ids(draft, step, -2),
    "a tensor as its distribution": lambda draft, step: Draft(
        draft.token_ids, draft.lengths, distribution=torch.ones(3)
    ),
    "an undeclared kind": lambda draft, step: _with_distribution(draft, DistributionKind.SPARSE),
    "an unknown kind": lambda draft, step: _with_distribution(draft, 9),
    "a kind without its tensor": lambda draft, step: _with_distribution(draft, DistributionKind.DENSE_PROBS),
    "a distribution of another shape": lambda draft, step: _with_probs(draft, lambda probs: probs[..., 1:]),
    "a distribution on another device": lambda draft, step: _with_probs(draft, lambda probs: probs.to("meta")),
    "a distribution of integers": lambda draft, step: _with_probs(draft, lambda probs: probs.long()),
    "probabilities of half the mass": lambda draft, step: _with_probs(draft, lambda probs: probs / 2),
    "negative probabilities": lambda draft, step: _with_probs(draft, lambda probs: probs + signs(probs)),
    "probabilities that are no numbers": lambda draft, step: _with_probs(draft, lambda probs: probs * torch.nan),
}
ODD: dict[str, Callable[[Draft, StepView], object]] = {"sleep": _sleeping, "write to the step": _writing}
"""What is no wrong draft and not right either."""


class KeepsByRow(Scripted):
    """Drafts what was newest in a row before, whoever had the row then, and never forgets."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__(config)
        self.newest: dict[int, int] = {}

    def propose(self, step: StepView) -> Draft:
        rows = zip(step.slots.tolist(), step.newest_token.tolist(), step.budget.tolist(), strict=True)
        drafts = []
        for row, token, budget in rows:
            drafts.append([self.newest.get(row, token)] * budget)
            self.newest[row] = token
        return Draft.from_lists(drafts, step.width)


class Vandal(Recorder):
    """Overwrites every tensor that it is shown, and drafts as if every budget were K."""

    def observe(self, step: StepView) -> None:
        self.vandalise(step)

    def propose(self, step: StepView) -> Draft:
        draft = super().propose(step)
        self.vandalise(step)
        return Draft(draft.token_ids.fill_(7), torch.full_like(draft.lengths, step.width))

    @staticmethod
    def vandalise(step: StepView) -> None:
        for holder in (step, step.kept, step.sampling):
            for value in vars(holder).values():
                if isinstance(value, Tensor):
                    value.fill_(step.width)


class Bushes(Scripted):
    """Trees of any shape around the truth: somewhere in each stands as much of it as a random number says."""

    needs = Needs(extensions=(Trees(),))

    def propose(self, step: StepView) -> Draft:
        columns = (step.request_ids, step.committed_length.tolist(), step.budget.tolist())
        trees = [self.tree(*facts) for facts in zip(*columns, strict=True)]
        return Draft.from_trees(trees, step.width)

    def tree(self, request_id: str, length: int, budget: int) -> list[tuple[int, int]]:
        known, random = self.known.get(request_id, ()), Random(length)
        tree: list[tuple[int, int]] = []
        depth, right = [], [-1]  # of each node; the nodes that are true so far
        for node in range(random.randint(0, budget)):
            parent = right[-1] if random.random() < 0.6 else random.randint(-1, node - 1)
            depth.append(0 if parent < 0 else depth[parent] + 1)
            token = self.token(known, length + depth[-1])
            taken = {token for above, token in tree if above == parent}
            if parent == right[-1] and token not in taken and random.random() < 0.7:
                right.append(node)
            else:
                token = next(each for each in range(7, VOCAB_SIZE) if each not in {*taken, token})
            tree.append((parent, token))
        return tree


class WatchingBushes(Bushes):
    """Looks at what became of each tree: the accepted nodes, the hidden states of kept tokens."""

    needs = Needs(hidden_states=("final",), extensions=(Trees(),))
    seen: ClassVar[list[tuple[list[int], list[int], int]]] = []
    hidden: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def propose(self, step: StepView) -> Draft:
        nodes, kept = step.accepted_nodes, step.kept
        assert nodes is not None
        (hidden,) = kept.hidden
        for b, name in enumerate(step.request_ids):
            path = [node for node in nodes[b].tolist() if node >= 0]
            assert len(path) == int(step.num_accepted[b])
            first, stop = kept.token_offsets[b : b + 2].tolist()
            for row in range(first, stop):
                position = int(kept.positions[row])
                key = (*self.known[name][: position + 1],)
                assert key[-1] == int(kept.token_ids[row])
                self.hidden[key] = hidden[row].clone()
            if path != list(range(len(path))):
                self.seen.append((path, kept.positions[first:stop].tolist(), int(step.committed_length[b])))
        return super().propose(step)


class SeesAll:
    """Writes down the positions that it is shown. Drafts nothing."""

    needs = Needs(whole_prompt=True)

    def __init__(self, config):
        self.shown = []

    def observe(self, step):
        self.shown += step.kept.positions.tolist()

    def propose(self, step):
        return Draft.from_lists([[] for _ in step.requests], step.width)
