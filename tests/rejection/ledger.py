"""A simulated decode that knows which random numbers had a say in each step, and shows that no others had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec.core.kernels.philox import Stream, draft_key, uniform
from specdec.core.rejection import DistributionKind, DraftDistributions, DraftRows, Uniforms, Verdict
from specdec.testing.rejection.reference import Params, draw

from .batches import equal
from .problems import sampling_rows

VOCAB = 12
K = 4
TABLE = 2 * torch.randn(VOCAB, 5, VOCAB, generator=torch.Generator().manual_seed(0))
MIXED = [
    Params(),
    Params(temperature=0.0),
    Params(temperature=0.7, top_k=5),
    Params(temperature=1.2, top_p=0.8),
    Params(min_p=0.1),
]


def logits_after(tokens: list[int]) -> Tensor:
    """A target whose distribution depends on the newest token and on the position."""
    return TABLE[tokens[-1], len(tokens) % 5]


@dataclass
class Ledger:
    """Every random number that had a say, by key and counter, with what it was used for."""

    entries: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)

    def spend(self, key: int, position: int, stream: Stream) -> float:
        self.entries[(key, position, int(stream), 0)] += 1
        return float(uniform(torch.tensor(key), torch.tensor(position), stream))


@dataclass
class Request:
    """One request of the simulated decode."""

    seed: int
    params: Params
    tokens: list[int]
    reports: bool  # its drafts come with their distribution


def draft(request: Request, length: int) -> tuple[list[int], list[Tensor]]:
    """Ids drawn from a flattened target distribution by the draft stream, and their distributions."""
    key, context, distributions = int(draft_key(torch.tensor(request.seed))), list(request.tokens), []
    for _ in range(length):
        distributions.append((logits_after(context) / 1.7).double().softmax(-1))
        number = uniform(torch.tensor(key), torch.tensor(len(context)), Stream.DRAFT)
        context.append(draw(distributions[-1], float(number)))
    return context[len(request.tokens) :], distributions


def spent_uniforms(request: Request, verdict: Verdict, b: int, length: int, ledger: Ledger) -> tuple[list, list]:
    """The uniforms that the rules say had a say in this verdict; all the others are replaced by nonsense."""
    accepted, start = int(verdict.num_accepted[b]), len(request.tokens)
    accept, output = [0.123] * K, [0.456] * (K + 1)
    if request.params.temperature <= 0:
        return accept, output
    if request.reports:
        for i in range(min(accepted + 1, length)):
            accept[i] = ledger.spend(request.seed, start + i, Stream.ACCEPT)
            ledger.spend(int(draft_key(torch.tensor(request.seed))), start + i, Stream.DRAFT)
        output[accepted] = ledger.spend(request.seed, start + accepted, Stream.RESAMPLE)
    else:
        for i in range(accepted + 1):
            output[i] = ledger.spend(request.seed, start + i, Stream.RESAMPLE)
    return accept, output


def mixed_step(verify: Callable, batch: list[Request], lengths: list[int], ledger: Ledger) -> Verdict:
    """One step, done with the seeds and again with only the uniforms that the rules name; both must agree."""
    ids = torch.full((len(batch), K), -1)
    probs = torch.full((len(batch), K, VOCAB), torch.nan, dtype=torch.float64)
    rows = []
    for b, (request, length) in enumerate(zip(batch, lengths, strict=True)):
        drawn, distributions = draft(request, length)
        for i, (token, distribution) in enumerate(zip(drawn, distributions, strict=True)):
            ids[b, i], probs[b, i] = token, distribution
        rows += [logits_after(request.tokens + drawn[:i]) for i in range(length + 1)]
    kind = [DistributionKind.DENSE_PROBS if request.reports else DistributionKind.ONE_HOT for request in batch]
    sampling = replace(
        sampling_rows([request.params for request in batch]),
        seed=torch.tensor([request.seed for request in batch]),
        position=torch.tensor([len(request.tokens) for request in batch]),
    )
    distributions = DraftDistributions(torch.tensor(kind, dtype=torch.uint8), draft_probs=probs) if any(kind) else None
    drafts = DraftRows(ids, torch.tensor(lengths), distributions)
    cu_rows = torch.nn.functional.pad((torch.tensor(lengths) + 1).cumsum(0), (1, 0))
    verdict = verify(torch.stack(rows), cu_rows, drafts, sampling)
    spent = [spent_uniforms(r, verdict, b, lengths[b], ledger) for b, r in enumerate(batch)]
    accept, output = (torch.tensor(side, dtype=torch.float64) for side in zip(*spent, strict=True))
    named = verify(torch.stack(rows), cu_rows, drafts, sampling, Uniforms(output, accept))
    assert equal(named, verdict), "the verifier drew other uniforms than the rules name"
    return verdict


def simulate(verify: Callable, num_steps: int) -> tuple[list[Request], Ledger]:
    """Shuffled, shrinking and regrowing batches, in which drafts are dropped and drawn anew."""
    g = torch.Generator().manual_seed(3)
    requests = [Request(100 + b, MIXED[b % len(MIXED)], [b], reports=b % 2 == 0) for b in range(8)]
    ledger = Ledger()
    for _ in range(num_steps):
        size = int(torch.randint(1, 5, (), generator=g))
        batch = [requests[i] for i in torch.randperm(len(requests), generator=g)[:size].tolist()]
        for request in batch:
            if torch.rand((), generator=g) < 0.1:
                draft(request, K)  # preempted before its drafts were verified
        lengths = torch.randint(0, K + 1, (size,), generator=g).tolist()
        verdict = mixed_step(verify, batch, lengths, ledger)
        for request, new in zip(batch, verdict.output_ids.tolist(), strict=True):
            request.tokens.extend(token for token in new if token >= 0)
    return requests, ledger
