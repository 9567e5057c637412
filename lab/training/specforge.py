"""Data for the offline trainers of SpecForge (https://github.com/sgl-project/SpecForge): a file for each text."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import IO, cast

import torch

from .row import TrainingRow

ROWS_PER_FOLDER = 2000
KEYS: dict[str, tuple[str, str | None]] = {
    "eagle3": ("aux_hidden_state", "hidden_state"),
    "dflash": ("hidden_states", None),
    "dspark": ("hidden_states", "target_last_hidden_states"),
}
"""By drafter: the keys of the layers' states side by side, and of the target's last one."""


def write(folder: Path, rows: Iterable[TrainingRow], drafter: str, *, compress: bool) -> int:
    """Write the files into an empty folder. Returns how many rows there are. Raises OSError."""
    layers, last = KEYS[drafter]
    number = -1
    for number, row in enumerate(rows):
        assert row.states is not None, "asked for by the caller"
        values = {"input_ids": torch.tensor(row.input_ids), "loss_mask": torch.tensor(row.loss_mask)}
        values[layers] = row.states[None, :, :-1].flatten(2).contiguous()  # [1, T, L*H]
        if last is not None:
            values[last] = row.states[None, :, -1].contiguous()  # [1, T, H]
        first = number - number % ROWS_PER_FOLDER
        path = folder / f"rows_{first}-{first + ROWS_PER_FOLDER}" / f"data_{number}.ckpt"
        path.parent.mkdir(exist_ok=True)
        packed = path.with_suffix(".ckpt.gz")
        with cast("IO[bytes]", gzip.open(packed, "wb")) if compress else path.open("wb") as file:
            torch.save(values, file)
    return number + 1
