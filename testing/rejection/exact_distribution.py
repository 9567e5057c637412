"""The exact distribution of a verifier's output, found by bisection: no sampling, no false alarm, resolution near
1e-15.

A verifier is monotone in each of its uniforms, so the threshold at which a draft is accepted, and those at which the
emitted token changes, are found to the last bit by halving. With the distributions of a tiny model these thresholds
give the probability of every output sequence; completed by the target's own chain it must equal the target's
distribution of K + 1 tokens. Every bisection of a problem advances in one call of the verifier per iteration.

A slow verifier is helped by the thresholds of a fast one: each search first looks just below and just above them.
That is only where it looks first. A threshold that is not there is searched for in the whole interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.core.rejection import DraftDistributions, DraftRows, SamplingRows, Uniforms, Verdict

ALMOST_ZERO = 2.0**-53
ALMOST_ONE = 1.0 - 2.0**-53
NUM_ITERATIONS = 52
NEAR = 1e-7


class VerifyFunction(Protocol):
    """The function under proof."""

    def __call__(
        self, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms
    ) -> Verdict: ...


@dataclass(frozen=True)
class Problem:
    """A tiny model: every distribution for every prefix of at most K tokens of a vocabulary of V.

    Table i has a leading dimension V for each of the i drafts before it.
    """

    target_logits: list[Tensor]  # K + 1 tables [V, ..., V]: what the verifier is given
    target_distributions: list[Tensor]  # K + 1 tables float64 [V, ..., V]: the distribution that its output must follow
    draft_distributions: list[
        Tensor
    ]  # K tables float64 [V, ..., V]: the distribution that drafts are really drawn from
    report: Callable[[Tensor], DraftRows]  # what the proposer reports of drafts [T, K], row by row
    sampling: SamplingRows  # of one request
    coupled: bool  # drafts are verified by the output uniforms (one-hot and greedy) and not by accept uniforms
    block: bool = False  # the stop is the last place whose uniform accepts, and not the first whose uniform rejects

    @property
    def num_drafts(self) -> int:
        return len(self.draft_distributions)

    @property
    def vocab_size(self) -> int:
        return self.target_logits[0].shape[-1]


@dataclass(frozen=True)
class ExactDistribution:
    """What a verifier does to one problem."""

    output: Tensor  # [V, ..., V] float64, K + 1 dimensions: probability of every output sequence
    target: Tensor  # [V, ..., V] float64: what it ought to be
    expected_accepted: float  # drafts accepted per step
    thresholds: list[Tensor]  # what each search found, in the order of the searches

    @property
    def total_variation(self) -> float:
        return float((self.output - self.target).abs().sum()) / 2


def exact_distribution(
    verify: VerifyFunction,
    problem: Problem,
    num_iterations: int = NUM_ITERATIONS,
    near: ExactDistribution | None = None,
) -> ExactDistribution:
    """The distribution of the next K + 1 tokens when `verify` verifies the problem's drafts and the target goes on
    alone.

    Thresholds are found to within 2^-num_iterations; `near` says where to look first.
    """
    return _Proof(verify, problem, num_iterations, near).run()


class _Proof:
    """One problem's draft tuples x_1..x_K of positive probability, T in number, and the verifier under proof."""

    def __init__(
        self, verify: VerifyFunction, problem: Problem, num_iterations: int, near: ExactDistribution | None
    ) -> None:
        self.verify = verify
        self.problem = problem
        self.resolution = 2.0**-num_iterations
        self.guesses = iter(near.thresholds) if near is not None else None
        self.found: list[Tensor] = []
        vocab = torch.arange(problem.vocab_size)
        drafts = torch.cartesian_prod(*[vocab] * problem.num_drafts).view(-1, problem.num_drafts)
        prob = torch.ones(len(drafts), dtype=torch.float64)
        for i, distribution in enumerate(problem.draft_distributions):
            prob = prob * distribution[tuple(drafts[:, : i + 1].T)]
        self.drafts = drafts[prob > 0]  # [T, K]
        self.draft_prob = prob[prob > 0]  # [T]
        self.reported = problem.report(self.drafts)
        tables = [table[tuple(self.drafts[:, :i].T)] for i, table in enumerate(problem.target_logits)]
        self.logits = torch.stack([table.expand(len(self.drafts), -1) for table in tables], 1)  # [T, K + 1, V]

    def run(self) -> ExactDistribution:
        rule = self._block if self.problem.block else self._coupled if self.problem.coupled else self._standard
        prob = self.draft_prob.view(-1, 1, 1) * rule()  # [T, K + 1, V]
        expected = (prob.sum((0, 2)) * torch.arange(self.problem.num_drafts + 1)).sum()
        return ExactDistribution(
            self._complete(prob), chain_distribution(self.problem.target_distributions), float(expected), self.found
        )

    def _standard(self) -> Tensor:
        """P(stop at i and emit y) [T, K + 1, V], where the first place whose uniform rejects is the stop."""
        accept, emitted = self._decided(ALMOST_ZERO, stopping=ALMOST_ONE, back=0)
        accept = torch.where(torch.arange(accept.shape[1]) < self.reported.lengths.unsqueeze(1), accept, 0.0)
        return _reached(accept) * (emitted * (1 - pad(accept, (0, 1))).unsqueeze(2))

    def _block(self) -> Tensor:
        """P(stop at i and emit y) [T, K + 1, V], where the highest place whose uniform accepts is the stop."""
        accept, emitted = self._decided(ALMOST_ONE, stopping=ALMOST_ZERO, back=1)
        none_above = pad((1 - accept).flip(1).cumprod(1).flip(1), (0, 1), value=1.0)  # [T, K + 1]
        return (pad(accept, (1, 0), value=1.0) * none_above).unsqueeze(2) * emitted

    def _decided(self, others: float, *, stopping: float, back: int) -> tuple[Tensor, Tensor]:
        """P(a uniform accepts its draft) [T, K], and the distribution of the token of each stop [T, K + 1, V].

        others: the accept uniforms of all other drafts. A place is the stop if the draft so many places back has the
        accept uniform `stopping`.
        """
        num_tuples, num_drafts = self.drafts.shape
        tuples, places = _grid(num_tuples, num_drafts)
        accept_uniforms, output_uniforms = self._uniforms(len(tuples), others)
        search = _Search(tuples, accept_uniforms, output_uniforms, accept_uniforms, places)
        accept = self._bisect(search, lambda verdict: verdict.num_accepted > places).view(num_tuples, num_drafts)

        tuples, places = _grid(num_tuples, num_drafts + 1)
        accept_uniforms, output_uniforms = self._uniforms(len(tuples), others)
        has_draft = (places >= back) & (places - back < num_drafts)
        accept_uniforms[has_draft, places[has_draft] - back] = stopping
        emitted = self._emitted(tuples, accept_uniforms, output_uniforms, places)
        return accept, emitted.view(num_tuples, num_drafts + 1, -1)

    def _coupled(self) -> Tensor:
        """The same as `_standard`, where one uniform both verifies a place's draft and draws its token."""
        num_tuples, num_drafts = self.drafts.shape
        tuples = torch.arange(num_tuples)
        accept_uniforms, output_uniforms = self._uniforms(num_tuples, ALMOST_ZERO)
        accept, stop = [], []
        for i in range(num_drafts + 1):
            emitted = self._emitted(tuples, accept_uniforms, output_uniforms, torch.full_like(tuples, i))  # [T, V]
            middles = emitted.cumsum(1) - emitted / 2
            verdicts = []
            for token in range(self.problem.vocab_size):
                output_uniforms[:, i] = middles[:, token]
                verdicts.append(self._run(tuples, accept_uniforms, output_uniforms).num_accepted > i)
            accepted = torch.stack(verdicts, 1)  # [T, V]
            accept.append((emitted * accepted).sum(1))
            stop.append(torch.where(accepted, 0.0, emitted))
            output_uniforms[:, i] = (middles * accepted).sum(1) / accepted.sum(1).clamp(min=1)
        return _reached(torch.stack(accept[:-1], 1)) * torch.stack(stop, 1)

    def _emitted(self, tuples: Tensor, accept_uniforms: Tensor, output_uniforms: Tensor, places: Tensor) -> Tensor:
        """The distribution of the token at a place under its output uniform, float64 [N, V], for N settings that stop
        there.
        """
        copies = self.problem.vocab_size - 1
        rows = torch.arange(len(tuples)).repeat_interleave(copies)
        tokens = torch.arange(copies).repeat(len(tuples))
        output = output_uniforms[rows]
        search = _Search(tuples[rows], accept_uniforms[rows], output, output, places[rows])
        at = (torch.arange(len(rows)), places[rows])
        cdf = self._bisect(search, lambda verdict: verdict.output_ids[at] <= tokens).view(len(tuples), copies)
        return pad(cdf, (0, 1), value=1.0) - pad(cdf, (1, 0))

    def _bisect(self, search: _Search, holds: Callable[[Verdict], Tensor]) -> Tensor:
        """The largest uniform for which `holds` still does, float64 [N]; all N searches advance together."""
        low = torch.zeros(len(search.tuples), dtype=torch.float64)
        high = torch.ones_like(low)
        if self.guesses is not None:
            guess = next(self.guesses)
            for bound in (guess - NEAR, guess + NEAR):
                self._narrow(search, holds, bound.clamp(ALMOST_ZERO, ALMOST_ONE), low, high)
        while float((high - low).max()) > self.resolution:
            self._narrow(search, holds, (low + high) / 2, low, high)
        self.found.append((low + high) / 2)
        return self.found[-1]

    def _narrow(
        self, search: _Search, holds: Callable[[Verdict], Tensor], at: Tensor, low: Tensor, high: Tensor
    ) -> None:
        """Move one end of every interval to a uniform within it."""
        rows = torch.arange(len(at))
        search.uniforms[rows, search.places] = at
        below = holds(self._run(search.tuples, search.accept, search.output))
        low.copy_(torch.where(below, torch.maximum(low, at), low))
        high.copy_(torch.where(below, high, torch.minimum(high, at)))

    def _uniforms(self, num_rows: int, accept_uniform: float) -> tuple[Tensor, Tensor]:
        """Accept uniforms [N, K] that are all alike, and output uniforms [N, K + 1] in the middle."""
        num_drafts = self.problem.num_drafts
        accept = torch.full((num_rows, num_drafts), accept_uniform, dtype=torch.float64)
        return accept, torch.full((num_rows, num_drafts + 1), 0.5, dtype=torch.float64)

    def _run(self, tuples: Tensor, accept_uniforms: Tensor, output_uniforms: Tensor) -> Verdict:
        lengths = self.reported.lengths[tuples]
        used = torch.arange(self.problem.num_drafts + 1) <= lengths.unsqueeze(1)
        drafts = DraftRows(self.reported.token_ids[tuples], lengths, _take(self.reported.distributions, tuples))
        cu_rows = pad((lengths + 1).cumsum(0), (1, 0))
        sampling = _expand(self.problem.sampling, len(tuples))
        uniforms = Uniforms(output_uniforms, accept_uniforms)
        verdict = self.verify(self.logits[tuples][used], cu_rows, drafts, sampling, uniforms)
        kept = torch.arange(self.problem.num_drafts) < verdict.num_accepted.unsqueeze(1)
        emitted = verdict.output_ids[:, :-1]
        assert torch.equal(emitted[kept], drafts.token_ids[kept]), "an accepted draft was not emitted"
        return verdict

    def _complete(self, prob: Tensor) -> Tensor:
        """The distribution of K + 1 tokens, given prob [T, K + 1, V] of stopping at a place with a token."""
        num_drafts, vocab_size = self.problem.num_drafts, self.problem.vocab_size
        distribution = prob[:, 0].sum(0)
        for i in range(1, num_drafts + 1):
            stopped = torch.zeros([vocab_size] * (i + 1), dtype=torch.float64)
            stopped.index_put_(tuple(self.drafts[:, :i].T), prob[:, i], accumulate=True)
            distribution = distribution.unsqueeze(-1) * self.problem.target_distributions[i] + stopped
        return distribution


@dataclass(frozen=True)
class _Search:
    """N searches for one uniform each, the others being given."""

    tuples: Tensor  # [N] index of the draft tuple
    accept: Tensor  # [N, K]
    output: Tensor  # [N, K + 1]
    uniforms: Tensor  # accept or output: the one that is searched
    places: Tensor  # [N]


def chain_distribution(distributions: list[Tensor]) -> Tensor:
    """The distribution of len(distributions) tokens in sequence, given the distribution of each after every prefix."""
    distribution = distributions[0]
    for table in distributions[1:]:
        distribution = distribution.unsqueeze(-1) * table
    return distribution


def _reached(accept: Tensor) -> Tensor:
    """P(place i is reached) [T, K + 1, 1], given P(accept draft i | reached) [T, K]."""
    return pad(accept, (1, 0), value=1.0).cumprod(1).unsqueeze(2)


def _grid(*sizes: int) -> tuple[Tensor, Tensor]:
    first, second = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T
    return first, second


def _expand(sampling: SamplingRows, num_rows: int) -> SamplingRows:
    return replace(sampling, **{name: each.expand(num_rows) for name, each in _tensors(sampling).items()})


def _take(distributions: DraftDistributions | None, rows: Tensor) -> DraftDistributions | None:
    if distributions is None:
        return None
    by_row = {name: each[rows] for name, each in _tensors(distributions).items() if name != "t2d"}
    return replace(distributions, **by_row)


def _tensors(record: object) -> dict[str, Any]:
    """The tensors of a record by the names of its fields."""
    return {name: each for name, each in vars(record).items() if isinstance(each, Tensor)}
