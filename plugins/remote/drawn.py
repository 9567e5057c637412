"""Drawn drafts from elsewhere: what they are to be drawn with, and what they say that they were drawn from.

A draft that was drawn is verified by its distribution. That is exact if no drawn value has a part in whether the draft
is used. So a step waits for it, and it is offered behind the text that it was drawn for, or never.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.sdk.config import ProposerConfig
from specdec.sdk.errors import PluginId, Refusal
from specdec.sdk.types import PADDING_TOKEN_ID, DistributionKind, DraftDistribution, StepView
from specdec.sdk.wire import MAX_MESSAGE_BYTES, Distribution, Drawing, Form

MOST_ENTRY_BYTES = 12
"""An id and a number of double precision."""

TABLES = {DistributionKind.DENSE_PROBS: "probs", DistributionKind.DENSE_LOGITS: "logits"}
"""The field of `DraftDistribution` for each dense kind."""


def refuse_deadline(config: ProposerConfig, deadline_ms: float | None, plugin: PluginId | None = None) -> None:
    """Raise Refusal for drawn drafts that are waited for no longer than a deadline."""
    if config.draft_sample_method == "probabilistic" and deadline_ms is not None:
        reason = (
            f'draft_sample_method is "probabilistic" and deadline_ms is {deadline_ms:g}: drawing may take as long as '
            "what is drawn, and drafts that are dropped for it change the distribution of the text"
        )
        raise Refusal(reason, 'no deadline_ms, or "draft_sample_method": "greedy"', plugin=plugin)


def most_answer_bytes(form: Form | None, num_rows: int, num_draft_tokens: int) -> int:
    """The size of an answer with the distributions of all rows, at most."""
    return MAX_MESSAGE_BYTES + (0 if form is None else num_rows * num_draft_tokens * form.width * MOST_ENTRY_BYTES)


def drawings_of(step: StepView, num_uniforms: int) -> list[Drawing]:
    """What the drafts of each request are drawn with; nothing if all of them are greedy.

    num_uniforms: as the server said. 0 means that it is of a version that draws nothing.
    """
    sampling = step.sampling
    if not num_uniforms or (sampling is not None and sampling.all_greedy):
        return []
    told = {} if sampling is None else {name: each for name, each in vars(sampling).items() if isinstance(each, Tensor)}
    uniforms = torch.stack([step.random.uniform(index) for index in range(num_uniforms)], dim=1)
    columns = zip(*(each.tolist() for each in told.values()), strict=True) if told else [()] * len(step)
    pairs = zip(uniforms.tolist(), columns, strict=True)
    return [Drawing(numbers, **dict(zip(told, values, strict=True))) for numbers, values in pairs]


@dataclass(frozen=True)
class DrawnFrom:
    """The distributions of one request's n drafts, by the fields of `DraftDistribution`."""

    kind: DistributionKind
    tables: Mapping[str, Tensor]  # [n, m] each

    @classmethod
    def read(cls, told: Distribution, num_drafts: int, form: Form | None) -> DrawnFrom:
        """Raises ValueError for what is none of this form. Whether probabilities are any is for the engine to check."""
        kind, dtype = DistributionKind(told.kind), getattr(torch, told.dtype)
        if form is None or (kind == DistributionKind.SPARSE) != (form.name == "sparse"):
            raise ValueError(f"it reported distributions of the kind {kind.name}, and was asked for {form}")
        values = _table(told.values, dtype, num_drafts)
        if kind != DistributionKind.SPARSE:
            if values.shape[1] != form.width:
                raise ValueError(f"a distribution has {values.shape[1]} entries, and {form.width} were asked for")
            return cls(kind, {TABLES[kind]: values})
        ids = _table(told.ids, torch.int32, num_drafts).long()
        if ids.shape != values.shape or ids.shape[1] > form.width:
            raise ValueError(f"it reported {list(values.shape)} probabilities of {list(ids.shape)} ids; {form}")
        return cls(kind, {"sparse_ids": ids, "sparse_probs": values})


def distribution_of(rows: Sequence[DrawnFrom | None], width: int, form: Form | None) -> DraftDistribution | None:
    """The distributions of a step's drafts. rows: None means that a row is one-hot. Returns None if all of them are."""
    drawn = [each for each in rows if each is not None]
    if not drawn or form is None:
        return None
    tables: dict[str, Any] = {}
    for name, example in ((name, table) for each in drawn for name, table in each.tables.items()):
        if name not in tables:
            padding = PADDING_TOKEN_ID if name == "sparse_ids" else 0
            tables[name] = example.new_full((len(rows), width, form.width), padding)
    for place, row in enumerate(rows):
        for name, table in (row.tables if row is not None else {}).items():
            part = table[:width]
            tables[name][place, : part.shape[0], : part.shape[1]] = part
    kinds = [DistributionKind.ONE_HOT if each is None else each.kind for each in rows]
    return DraftDistribution(kind=torch.tensor(kinds, dtype=torch.uint8), **tables)


def _table(data: bytes, dtype: torch.dtype, num_rows: int) -> Tensor:
    """[num_rows, m] for any m. Raises ValueError for bytes that are no such table."""
    if not num_rows or not data or len(data) % (num_rows * dtype.itemsize):
        raise ValueError(f"a distribution of {num_rows} drafts has {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(num_rows, -1)
