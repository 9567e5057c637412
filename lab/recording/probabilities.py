"""Reduce logits to what a recording keeps: the likeliest tokens, the tail's mass, the entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.kernels.filters import FilterRows
from specdec.core.kernels.row_distribution import row_distribution, scale_of


def distribution_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [T, V] of logits [T, V], as verification reads them; of a greedy request at temperature 1."""
    count, temperature = len(logits), 1.0 if params.greedy else params.temperature
    filters = None
    if not params.greedy:
        columns = (params.top_k, torch.int64), (params.top_p, torch.float32), (params.min_p, torch.float32)
        filters = FilterRows(
            *(torch.full((count,), value, dtype=kind, device=logits.device) for value, kind in columns)
        )
    found = row_distribution(logits, scale_of(torch.full((count,), temperature, device=logits.device)), filters)
    rows = torch.arange(count, device=logits.device)
    return found.probs(rows).flatten(1)[:, : logits.shape[1]]


def summarise(logits: Tensor, token_ids: Sequence[int], params: SamplingParams, top_m: int) -> dict[str, Tensor]:
    """What is kept of logits [T, V] from which `token_ids` [T] were committed, by the names of `RecordedRequest`."""
    probs = distribution_of(logits, params)
    top = probs.topk(min(top_m, probs.shape[1]), dim=-1)
    committed = probs.gather(1, torch.tensor(token_ids, device=probs.device)[:, None]).squeeze(1)
    kept = {
        "top_ids": top.indices,
        "top_logprobs": top.values.log().float(),
        "token_logprobs": committed.log().float(),
        "tail_mass": (1 - top.values.double().sum(-1)).clamp(min=0).float(),
        "entropy": torch.special.entr(probs).sum(-1).float(),
    }
    return {name: each.cpu() for name, each in kept.items()}
