"""Logits after bias, min_tokens and penalties; log-probabilities that are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from specdec.sdk.trees import path_to

from ..cache.transfer import upload
from ..request.request import Request
from .batch import Scheduled

_NEVER = float("-inf")


def adjust_logits(
    logits: Tensor,
    shares: Sequence[Scheduled],
    drafted: Sequence[Sequence[int]],
    first_rows: Sequence[int],
    parents: Sequence[Sequence[int]] | None = None,
) -> None:
    """Apply bias, min_tokens and penalties in place to the requests that ask for any, from one upload.

    logits [R, V]; `drafted[b]` are request b's drafts, `first_rows[b]` is its first row. Row i of a request follows its
    committed tokens and its first i drafts, and is adjusted as plain decoding would adjust it there. Repetition looks
    at prompt and output, frequency and presence at the output. Tokens that nothing was asked for are not touched.
    With `parents` the drafts are nodes of trees, and row i follows the path to node i - 1.
    """
    changes: list[Sequence[float]] = []
    for b, (share, drafts, first_row) in enumerate(zip(shares, drafted, first_rows, strict=True)):
        if share.samples and share.request.adjusts_logits:
            for i in range(len(drafts) + 1):
                before = drafts[:i] if parents is None else [drafts[node] for node in path_to(i - 1, parents[b])]
                changes += _changes(first_row + i, share.request, before)
    if not changes:
        return
    rows, ids, bias, barred, factor, counts, frequency, presence = upload(
        list(zip(*changes, strict=True)), logits.device, torch.float64
    )
    places, precise = (rows.long(), ids.long()), torch.promote_types(logits.dtype, torch.float32)

    def applied(values: Tensor) -> Tensor:
        return values.to(logits.dtype)  # what each change leaves is rounded, as if it stood alone

    seen = applied(logits[places].to(precise) + bias.to(precise)).masked_fill(barred > 0, _NEVER).to(precise)
    factor = factor.to(precise)
    seen = applied(torch.where(seen > 0, seen / factor, seen * factor)).to(precise)
    subtracted = applied(frequency.to(precise) * counts.to(precise) + presence.to(precise))
    logits[places] = applied(seen - subtracted.to(precise))


def _changes(row: int, request: Request, drafts: Sequence[int]) -> list[Sequence[float]]:
    """For each token that is changed in a row: row, id, bias, whether it is barred, and of its penalties factor,
    count, frequency and presence.
    """
    params = request.params
    bias = params.logit_bias or {}
    barred = request.end_token_ids if request.num_output_tokens + len(drafts) < params.min_tokens else frozenset()
    outputs = request.output_counts + Counter(drafts) if request.penalised else Counter[int]()
    repeated = request.prompt_counts | outputs if params.repetition_penalty != 1 else Counter[int]()
    counted = outputs if params.frequency_penalty or params.presence_penalty else Counter[int]()
    return [
        (
            row,
            token_id,
            bias.get(token_id, 0.0),
            token_id in barred,
            params.repetition_penalty if token_id in repeated else 1.0,
            counted[token_id],
            params.frequency_penalty,
            params.presence_penalty if token_id in counted else 0.0,
        )
        for token_id in {*bias, *barred, *repeated, *counted}
    ]


def likely(logprobs: Tensor, emitted: Tensor, count: int) -> Tensor:
    """What is kept of logprobs [n, V]: ids and values of the `count` largest, and of `emitted` [>= n], -1 padded.

    float64 [n, 2 * (count + 1)], which holds a token id exactly.
    """
    top, ids = logprobs.topk(count), emitted[: len(logprobs), None]
    own = logprobs.gather(1, ids.clamp(min=0))
    return torch.cat([top.indices, ids, top.values.double(), own.double()], dim=1).double()


def read_likely(packed: Mapping[str, Tensor]) -> dict[str, list[dict[int, float]]]:
    """By request, the log-probabilities of each row by token id, in one read of one or more. See `likely`."""
    numbers = iter(torch.cat([each.flatten() for each in packed.values()]).tolist())
    found: dict[str, list[dict[int, float]]] = {}
    for name, each in packed.items():
        rows = [list(islice(numbers, each.shape[1])) for _ in range(len(each))]
        half = each.shape[1] // 2
        found[name] = [dict(zip(map(int, row[:half]), row[half:], strict=True)) for row in rows]
    return found
