"""A recording as training data, in the formats of two trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError

from specdec.core.model.hidden_states import HiddenState
from specdec.sdk import ConfigError

from ..recording import Recording
from . import specforge, speculators
from .row import training_rows

Format = Literal["speculators", "specforge"]


@dataclass(frozen=True)
class Exported:
    """What came of an export."""

    num_rows: int
    layers: tuple[HiddenState, ...]  # columns of the states, the target's last one at the end. Empty: no states


def export_data(
    recording: Recording,
    folder: Path,
    kind: Format,
    *,
    layers: Sequence[int] = (),
    drafter: str = "eagle3",
    compress: bool = False,
) -> Exported:
    """Write texts and states of a recording as a trainer reads them.

    layers: what the head reads, as in `Needs.hidden_states`. Empty means every recorded layer but the target's last.
    drafter: a key of `specforge.KEYS`. Files of SpecForge differ by it. compress: gzip the files of SpecForge.

    Raises ConfigError: SD-E272 if states are missing, SD-E273 if there is nothing to train on, SD-E274 if the folder is
    not empty, SD-E275 if the disk takes no more.
    """
    columns = _columns(recording, kind, tuple(layers))
    found = training_rows(recording, columns)
    first = next(found, None)
    if first is None:
        facts = {"requests": len(recording), "fix": "record more prompts, or with a larger --output-len"}
        raise ConfigError("SD-E273", f"{str(recording.folder)!r} holds no token to train on", facts)
    rows = chain([first], found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            facts = {"looked in": folder.absolute(), "fix": "name a new folder, or delete what is in this one"}
            raise ConfigError("SD-E274", f"{str(folder)!r} holds other files", facts)
        if kind == "speculators":
            num_rows = speculators.write(folder, rows)
        else:
            num_rows = specforge.write(folder, rows, drafter, compress=compress)
    except (OSError, SafetensorError, RuntimeError) as error:  # the latter two: of writers in other languages
        facts = {"because": str(error), "fix": "make room, delete the folder, and export again"}
        raise ConfigError("SD-E275", f"cannot write the training data into {str(folder)!r}", facts) from error
    return Exported(num_rows, columns)


def _columns(recording: Recording, kind: Format, layers: tuple[int, ...]) -> tuple[HiddenState, ...]:
    """The states to write. Trainers differ in the target's last one: speculators applies the final norm itself."""
    recorded = recording.manifest.hidden_states
    if not recorded and not layers and kind == "speculators":
        return ()  # its trainer asks a server for states that are missing
    num_layers = int(recording.manifest.target.get("num_layers", 0))
    last: HiddenState = num_layers if kind == "speculators" else "final"
    read = layers or tuple(each for each in recorded if each != "final" and each != num_layers)
    columns: tuple[HiddenState, ...] = (*read, last)
    if not read or any(each not in recorded for each in columns):
        facts = {
            "needed": f"the layers that the head reads, and {last} for what the target says",
            "recorded": ", ".join(map(str, recorded)) or "none",
            "fix": f"record again into another folder with --hidden-states {','.join(map(str, read or (2, 4)))},{last}",
        }
        raise ConfigError("SD-E272", f"the recording does not hold the states that {kind} trains on", facts)
    return columns
