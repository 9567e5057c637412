"""Many steps in a row: the same text with and without drafts, and no random number used for two things."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.philox import Stream
from specdec.core.rejection import DraftRows, SamplingRows, Verdict, sample, verify

from .ledger import MIXED, VOCAB, K, logits_after, simulate
from .mutation import Mutant, mutated
from .problems import sampling_rows

UNIFORMS, RATIO = "rejection/uniforms.py", "rejection/ratio.py"


def guess(tokens: list[int], uniform: Tensor) -> int:
    """A drafter that is often right and often wrong."""
    return int(logits_after(tokens).argmax()) if uniform < 0.6 else int(uniform * 997) % VOCAB


def one_hot_step(texts: list[list[int]], sampling: SamplingRows, generator: torch.Generator) -> Verdict:
    ids, lengths, rows = torch.full((len(texts), K), -1), [], []
    for b, tokens in enumerate(texts):
        context, length = list(tokens), int(torch.randint(0, K + 1, (), generator=generator))
        rows.append(logits_after(context))
        for i in range(length):
            context.append(guess(context, torch.rand((), generator=generator)))
            ids[b, i] = context[-1]
            rows.append(logits_after(context))
        lengths.append(length)
    cu_rows = torch.nn.functional.pad((torch.tensor(lengths) + 1).cumsum(0), (1, 0))
    at = replace(sampling, position=torch.tensor([len(tokens) for tokens in texts]))
    return verify(torch.stack(rows), cu_rows, DraftRows(ids, torch.tensor(lengths)), at)


def test_speculation_on_and_off_give_the_same_text() -> None:
    sampling, num_tokens = sampling_rows(MIXED), 200
    plain = [[b] for b in range(len(MIXED))]
    for _ in range(num_tokens):
        at = replace(sampling, position=torch.full((len(MIXED),), len(plain[0])))
        verdict = sample(torch.stack([logits_after(tokens) for tokens in plain]), at)
        for tokens, new in zip(plain, verdict.output_ids[:, 0].tolist(), strict=True):
            tokens.append(new)

    texts, generator, num_steps = [[b] for b in range(len(MIXED))], torch.Generator().manual_seed(1), 0
    while min(map(len, texts)) <= num_tokens:
        verdict = one_hot_step(texts, sampling, generator)
        for tokens, new in zip(texts, verdict.output_ids.tolist(), strict=True):
            tokens.extend(token for token in new if token >= 0)
        num_steps += 1
    assert [tokens[: num_tokens + 1] for tokens in texts] == plain
    assert num_steps < 0.8 * num_tokens


@pytest.mark.slow
def test_no_random_number_is_used_twice() -> None:
    requests, ledger = simulate(verify, num_steps=1000)
    assert set(ledger.entries.values()) == {1}
    for request in requests:
        spent = {at for key, at, stream, _ in ledger.entries if key == request.seed and stream == Stream.RESAMPLE}
        if request.params.temperature > 0 and not request.reports:
            assert spent == set(range(1, len(request.tokens)))  # what plain decoding spends
    assert Counter(stream for _, _, stream, _ in ledger.entries)[Stream.ACCEPT] > 500


SLIPS = {
    "accept_uniforms_are_output_uniforms": (UNIFORMS, "accept=accept[:, :-1]", "accept=output[:, :-1]"),
    "position_does_not_advance": (UNIFORMS, "unsqueeze(1) + offsets", "unsqueeze(1) + 0 * offsets"),
    "seed_of_the_first_request": (
        UNIFORMS,
        "seeds = sampling.seed.unsqueeze(1)",
        "seeds = sampling.seed[:1].unsqueeze(1)",
    ),
    "wrong_stream": (UNIFORMS, "positions, Stream.RESAMPLE", "positions, Stream.ACCEPT"),
    "uniform_of_the_last_place": (RATIO, "uniforms.output.gather(1, places.unsqueeze(1))", "uniforms.output[:, -1:]"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_ledger_notices_a_wrong_random_number(name: str, tmp_path: Path) -> None:
    file, before, after = SLIPS[name]
    mutant = Mutant(name, "ledger", file, before, after)
    with mutated(mutant, tmp_path) as package, pytest.raises(AssertionError, match="drew other uniforms"):
        simulate(package.verify, num_steps=60)
