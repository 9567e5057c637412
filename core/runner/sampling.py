"""Logits after bias, min_tokens and penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..request.request import Request
from .batch import Scheduled

_NEVER = float("-inf")


def adjust_logits(
    logits: Tensor, shares: Sequence[Scheduled], drafted: Sequence[Sequence[int]], first_rows: Sequence[int]
) -> None:
    """Apply bias, min_tokens and penalties in place to the requests that ask for any.

    logits [R, V]; `drafted[b]` are request b's drafts, `first_rows[b]` is its first row. Row i of a request follows its
    committed tokens and its first i drafts, and is adjusted as plain decoding would adjust it there.
    """
    for share, drafts, first_row in zip(shares, drafted, first_rows, strict=True):
        request = share.request
        if not share.samples or not request.adjusts_logits:
            continue
        for i in range(len(drafts) + 1):
            _adjust_row(logits[first_row + i], request, drafts[:i])


def _adjust_row(row: Tensor, request: Request, drafts: Sequence[int]) -> None:
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if request.num_output_tokens + len(drafts) < params.min_tokens and request.end_token_ids:
        row[torch.tensor(list(request.end_token_ids), device=row.device)] = _NEVER
    if request.penalised:
        _penalise(row, request, drafts)


def _penalise(row: Tensor, request: Request, drafts: Sequence[int]) -> None:
    """Repetition penalty over prompt and output, frequency and presence over the output. Touches seen tokens only."""
    params = request.params
    outputs = request.output_counts + Counter(drafts)
    if params.repetition_penalty != 1:
        seen = torch.tensor(list(request.prompt_counts | outputs), device=row.device)
        factor = params.repetition_penalty
        row[seen] = torch.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    if outputs and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(outputs), device=row.device)
        counts = torch.tensor(list(outputs.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.frequency_penalty * counts + params.presence_penalty
