"""One text to train on, cut from a recorded request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.core.model.hidden_states import HiddenState

from ..recording import RecordedRequest, Recording


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """T tokens. The target's states of the newest tokens were never shown, so they are left out."""

    input_ids: list[int]  # [T]
    loss_mask: list[int]  # [T], 1 for what the target said
    states: Tensor | None  # [T, L, H], the target's last one at the end. None: none were recorded


def training_rows(recording: Recording, layers: Sequence[HiddenState]) -> Iterator[TrainingRow]:
    """Rows of all requests that hold a token to train on.

    layers: the columns of `states`, recorded ones. Empty means no states, and whole texts.
    """
    for request in recording:
        if len(request.token_ids) < 2:
            continue  # it ended before the target read anything that it had said
        row = _row(recording, request, layers)
        if any(row.loss_mask):
            yield row


def _row(recording: Recording, request: RecordedRequest, layers: Sequence[HiddenState]) -> TrainingRow:
    states = None
    ids = [*request.prompt_token_ids, *request.token_ids]
    if layers:
        recorded = recording.manifest.hidden_states
        flat = recording.hidden_states(request.request_id)
        states = flat.reshape(len(flat), len(recorded), -1)[:, [recorded.index(each) for each in layers]]
        ids = ids[: len(states)]
    num_prompt = min(len(request.prompt_token_ids), len(ids))
    return TrainingRow(ids, [0] * num_prompt + [1] * (len(ids) - num_prompt), states)
