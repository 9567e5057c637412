"""Tiny models, drafters of trees over them, and the exact distribution of what a rule makes of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.rejection import DistributionKind, DraftDistributions, DraftRows, SamplingRows, Uniforms, Verdict
from specdec.testing.rejection.reference import Params, target_distribution
from specdec.testing.rejection.tree_reference import Nodes, TreeRule, left_of, outcomes

V = 3
DEPTH = 2
LENGTH = DEPTH + 1
EMPTY: list[tuple[int, int]] = []
SHAPES = [
    [*[-1] * first, *(parent for parent, count in enumerate(below) for _ in range(count))]
    for first in range(3)
    for below in itertools.product(range(3), repeat=first)
]
"""Parents of every tree of depth 2 and width 2, level by level."""
MOST_NODES = max(map(len, SHAPES))


@dataclass
class Model:
    """Logits after every prefix as a dtype holds them, and the distribution that parameters make of them."""

    seed: int
    params: Params = field(default_factory=Params)
    dtype: torch.dtype = torch.float64

    def logits(self, prefix: Sequence[int]) -> Tensor:
        number = self.seed * 1000 + sum((token + 1) * 4**i for i, token in enumerate(prefix))
        generator = torch.Generator().manual_seed(number)
        return (1.5 * torch.randn(V, generator=generator, dtype=torch.float64)).to(self.dtype).double()

    def __call__(self, prefix: Sequence[int]) -> Tensor:
        return target_distribution(self.logits(prefix), self.params)


@dataclass
class Masked(Model):
    """A grammar refuses one or two of the three tokens after every prefix, and never the likeliest."""

    def logits(self, prefix: Sequence[int]) -> Tensor:
        logits = super().logits(prefix)
        order = logits.argsort()
        return logits.index_fill(0, order[: 1 + int(order[0]) % 2], -torch.inf)


Drawn = Callable[[Model], Iterator[tuple[Nodes, float]]]


@dataclass
class Sketch:
    """A tree as it is drawn; p comes later."""

    parents: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)

    def prefix(self, place: int) -> list[int]:
        found: list[int] = []
        while place > 0:
            found.append(self.token_ids[place - 1])
            place = self.parents[place - 1] + 1
        return found[::-1]

    def siblings(self, place: int) -> list[int]:
        return [token for parent, token in zip(self.parents, self.token_ids, strict=True) if parent + 1 == place]

    def with_node(self, place: int, token: int, q: Tensor) -> Sketch:
        return Sketch([*self.parents, place - 1], [*self.token_ids, token], [*self.q, q])

    def nodes(self, target: Model) -> Nodes:
        p = [target(self.prefix(place)) for place in range(len(self.token_ids) + 1)]
        return Nodes(self.parents, self.token_ids, p, self.q)


def grown(
    draft: Model, next_place: Callable[[Sketch], int | None], *, replacement: bool = False
) -> Iterator[tuple[Sketch, float]]:
    """Every tree that is drawn node by node, where `next_place` says; None ends it."""
    waiting = [(Sketch(), 1.0)]
    while waiting:
        sketch, prob = waiting.pop()
        place = next_place(sketch)
        q = None if place is None else draft(sketch.prefix(place))
        if q is not None and not replacement:
            q = left_of(q, sketch.siblings(place))
        if place is None or q is None or not float(q.sum()) > 0:
            yield sketch, prob
            continue
        for token in range(V):
            if q[token] > 0:
                waiting.append((sketch.with_node(place, token, q), prob * float(q[token])))


def of_shape(parents: Sequence[int]) -> Callable[[Sketch], int | None]:
    def place(sketch: Sketch) -> int | None:
        number = len(sketch.token_ids)
        return parents[number] + 1 if number < len(parents) else None

    return place


def likeliest(draft: Model, parents: Sequence[int]) -> tuple[Sketch, float]:
    """The tree of each place's most likely tokens, one-hot."""
    sketch = Sketch()
    for parent in parents:
        rest = draft(sketch.prefix(parent + 1)).clone()
        rest[sketch.siblings(parent + 1)] = 0
        token = rest.argmax()
        sketch = sketch.with_node(parent + 1, int(token), torch.nn.functional.one_hot(token, V).double())
    return sketch, 1.0


def output_distribution(rule: TreeRule, trees: Iterator[tuple[Sketch, float]], target: Model) -> Tensor:
    """Of the next tokens [V, V, V], the target going on alone; exact."""
    found = torch.zeros([V] * LENGTH, dtype=torch.float64)
    for sketch, drawn in trees:
        nodes = sketch.nodes(target)
        for place, token, prob in outcomes(rule, nodes):
            output = (*sketch.prefix(place), token)
            found[output] += drawn * prob * continued(target, output)
    return found


def continued(target: Model, prefix: Sequence[int]) -> Tensor:
    """The distribution of what follows a prefix, up to the whole length."""
    if len(prefix) == LENGTH:
        return torch.ones((), dtype=torch.float64)
    p = target(prefix)
    return torch.stack([p[token] * continued(target, [*prefix, token]) for token in range(V)])


def variation(rule: TreeRule, trees: Iterator[tuple[Sketch, float]], target: Model) -> float:
    return float((output_distribution(rule, trees, target) - continued(target, [])).abs().sum()) / 2


@dataclass(frozen=True)
class Case:
    """Uniforms inside one outcome of a rule on a tree, and that outcome."""

    accept: list[float]  # by node
    output: list[float]  # by place
    place: int
    token: int


class Decision(NamedTuple):
    """One decision on the way to an outcome, and the uniforms that give it."""

    table: str  # accept or output
    index: int
    low: float
    high: float
    before: tuple[int, ...]  # what was decided before it


class _Recorder:
    """Takes the decisions of a branch, and remembers the interval of uniforms that gives each."""

    def __init__(self, script: Sequence[int], least: float) -> None:
        self.script, self.least = script, least
        self.found: list[Decision] = []
        self.others: list[list[int]] = []
        self.taken: list[int] = []

    def accepts(self, node: int, probability: float) -> bool:
        t = min(max(probability, 0.0), 1.0)
        return self._pick("accept", node, [(t, 1.0), (0.0, t)]) == 1

    def draw(self, place: int, weights: Tensor) -> int:
        ends = [0.0, *(weights.cumsum(0) / weights.sum()).tolist()]
        return self._pick("output", place, list(itertools.pairwise(ends)))

    def _pick(self, table: str, index: int, intervals: list[tuple[float, float]]) -> int:
        possible = [i for i, (low, high) in enumerate(intervals) if high - low > self.least]
        known = len(self.taken) < len(self.script)
        chosen = self.script[len(self.taken)] if known else possible[0]
        self.found.append(Decision(table, index, *intervals[chosen], tuple(self.taken)))
        self.taken.append(chosen)
        self.others.append([i for i in possible if i != chosen])
        return chosen


def outcomes_by_decisions(rule: TreeRule, nodes: Nodes, least: float) -> Iterator[tuple[list[Decision], int, int]]:
    """The decisions to each outcome of a rule, its place and its token. Intervals of at most `least` are left out."""
    waiting: list[list[int]] = [[]]
    while waiting:
        script = waiting.pop()
        recorder = _Recorder(script, least)
        place, token = rule(nodes, recorder)
        for depth in range(len(script), len(recorder.taken)):
            waiting += [[*recorder.taken[:depth], other] for other in recorder.others[depth]]
        yield recorder.found, place, token


def case_of(decisions: Sequence[Decision], place: int, token: int, moved: Mapping[int, float]) -> Case:
    """Uniforms in the middle of each decision's interval, but for those of the decisions that are moved."""
    tables = {"accept": [0.5] * MOST_NODES, "output": [0.5] * (MOST_NODES + 1)}
    for number, each in enumerate(decisions):
        tables[each.table][each.index] = moved.get(number, (each.low + each.high) / 2)
    return Case(tables["accept"], tables["output"], place, token)


def cases(rule: TreeRule, nodes: Nodes, eps: float) -> Iterator[Case]:
    """For each outcome and each decision that leads there, uniforms within `eps` of both ends of its interval."""
    for decisions, place, token in outcomes_by_decisions(rule, nodes, least=1e-5):
        for number, each in enumerate(decisions):
            yield case_of(decisions, place, token, {number: each.low + eps})
            yield case_of(decisions, place, token, {number: each.high - eps})


@dataclass(frozen=True)
class TreeBatch:
    """Trees as the verifier takes them, one request for each case."""

    logits: Tensor
    cu_rows: Tensor
    drafts: DraftRows
    sampling: SamplingRows
    uniforms: Uniforms
    expected: list[tuple[list[int], list[int]]]  # path and output ids of each request


def batch_of(
    found: Sequence[tuple[Sketch, Case]],
    target: Model,
    draft: Model,
    kind: DistributionKind,
    *,
    replacement: bool = False,
    dtype: torch.dtype = torch.float64,
) -> TreeBatch:
    """Ragged: every tree as large as it is, and distributions by place."""
    width = max(len(sketch.token_ids) for sketch, _ in found)
    places = [range(len(sketch.token_ids) + 1) for sketch, _ in found]
    logits = [target.logits(sketch.prefix(i)) for (sketch, _), each in zip(found, places, strict=True) for i in each]
    lengths = torch.tensor([len(each) - 1 for each in places])
    probs = torch.full((len(found), width, V), 1 / V, dtype=dtype)
    for b, ((sketch, _), each) in enumerate(zip(found, places, strict=True)):
        for i in list(each)[:width]:
            probs[b, i] = draft(sketch.prefix(i)).to(dtype)
    tables = {}
    if kind == DistributionKind.DENSE_PROBS:
        tables = {"draft_probs": probs}
    elif kind == DistributionKind.DENSE_LOGITS:
        tables = {"draft_logits": probs.log()}
    elif kind == DistributionKind.SPARSE:
        tables = {"sparse_ids": torch.arange(V).expand_as(probs), "sparse_probs": probs}
    kinds = torch.full((len(found),), int(kind), dtype=torch.uint8)

    def padded(rows: list[list[int]]) -> Tensor:
        return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(
            len(rows), width
        )

    params = target.params
    return TreeBatch(
        logits=torch.stack(logits).to(dtype),
        cu_rows=torch.nn.functional.pad((lengths + 1).cumsum(0), (1, 0)),
        drafts=DraftRows(
            padded([sketch.token_ids for sketch, _ in found]),
            lengths,
            DraftDistributions(kinds, replacement=torch.full((len(found),), replacement), **tables) if tables else None,
            padded([sketch.parents for sketch, _ in found]),
        ),
        sampling=SamplingRows(
            temperature=torch.full((len(found),), params.temperature),
            top_k=torch.full((len(found),), params.top_k),
            top_p=torch.full((len(found),), params.top_p),
            min_p=torch.full((len(found),), params.min_p),
            seed=torch.arange(len(found)),
            position=torch.full((len(found),), 7),
            all_greedy=False,
            any_filter=params.top_k > 0 or params.top_p < 1 or params.min_p > 0,
        ),
        uniforms=Uniforms(
            torch.tensor([case.output[: width + 1] for _, case in found], dtype=torch.float64),
            torch.tensor([case.accept[:width] for _, case in found], dtype=torch.float64),
        ),
        expected=[_expected(sketch, case) for sketch, case in found],
    )


def _expected(sketch: Sketch, case: Case) -> tuple[list[int], list[int]]:
    path = [case.place]
    while path[-1] > 0:
        path.append(sketch.parents[path[-1] - 1] + 1)
    return path[::-1], [*sketch.prefix(case.place), case.token]


def verified(batch: TreeBatch, verify: Callable[..., Verdict]) -> list[tuple[list[int], list[int]]]:
    """What `expected` says, by a verifier."""
    verdict = verify(batch.logits, batch.cu_rows, batch.drafts, batch.sampling, batch.uniforms)
    assert verdict.path is not None
    counts = (verdict.num_accepted + 1).tolist()
    pairs = zip(verdict.path.tolist(), verdict.output_ids.tolist(), counts, strict=True)
    return [(path[:count], ids[:count]) for path, ids, count in pairs]
