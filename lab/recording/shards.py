"""A shard: requests as rows of a Parquet file, and beside it their hidden states and logits in safetensors.

A shard counts once its Parquet file has its name. That file comes last, so a shard that was torn has none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.sdk import ConfigError

from .manifest import not_a_recording
from .request import RecordedRequest

TEXTS = ("request_id", "prompt_id", "category", "prompt", "text", "finish_reason")
NUMBERS = ("number", "turn", "seed")
TOKENS = ("prompt_token_ids", "token_ids", "past_token_ids")
PER_POSITION = ("token_logprobs", "tail_mass", "entropy")
PER_TOP = ("top_ids", "top_logprobs")
HIDDEN, LOGITS = "hidden_states", "logits"


def pyarrow() -> Any:
    """The library, with `parquet`. Raises ConfigError SD-E243 where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        facts = {"because": str(error), "fix": 'pip install "specdec-sdk[lab]"'}
        raise ConfigError("SD-E243", "recordings are Parquet files, and pyarrow is not installed", facts) from error
    return pyarrow


def parquet_path(folder: Path, number: int) -> Path:
    """Where the rows of a shard lie."""
    return folder / f"shard-{number:05}.parquet"


def tensors_path(folder: Path, number: int) -> Path:
    """Where the tensors of a shard lie."""
    return folder / f"shard-{number:05}.safetensors"


def tensor_name(kind: str, request_id: str) -> str:
    """Of hidden states or logits within a shard."""
    return f"{kind}/{request_id}"


def write_shard(
    folder: Path, number: int, requests: Sequence[RecordedRequest], tensors: Mapping[str, Tensor], room: int | None
) -> int:
    """Write a shard whole or not at all. Returns its bytes. Raises OSError; parts of it are removed then.

    room: most bytes that it may have. None means as many as the disk takes.
    """
    rows, states = parquet_path(folder, number), tensors_path(folder, number)
    parts = [path.with_name(f"{path.name}.tmp") for path in (rows, states)]
    try:
        if tensors:
            _save_tensors(tensors, parts[1])
        pyarrow().parquet.write_table(_table(requests), parts[0])
        num_bytes = sum(path.stat().st_size for path in parts if path.exists())
        if room is not None and num_bytes > room:
            raise OSError(errno.EFBIG, f"the next shard has {num_bytes} bytes, and max_disk leaves {room}")
        if tensors:
            os.replace(parts[1], states)
        os.replace(parts[0], rows)
    except BaseException:
        for path in (*parts, *(() if rows.exists() else (states,))):
            path.unlink(missing_ok=True)
        raise
    return num_bytes


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    except SafetensorError as error:  # of the disk: it has no class of its own
        raise OSError(None, str(error)) from error


def _table(requests: Sequence[RecordedRequest]) -> Any:
    pa = pyarrow()
    types = {name: pa.string() for name in TEXTS} | {name: pa.int64() for name in NUMBERS}
    types |= {name: pa.list_(pa.int32()) for name in (*TOKENS, "top_ids")}
    types |= {name: pa.list_(pa.float32()) for name in (*PER_POSITION, "top_logprobs")}
    columns = {name: [_plain(getattr(each, name)) for each in requests] for name in types}
    return pa.table({name: pa.array(columns[name], kind) for name, kind in types.items()})


def _plain(value: Any) -> Any:
    return value.reshape(-1).numpy() if isinstance(value, Tensor) else value


def read_shard(path: Path, top_m: int) -> list[RecordedRequest]:
    """All rows of a shard's Parquet file. Raises ConfigError SD-E244 if it is damaged."""
    pa = pyarrow()
    try:
        table = pa.parquet.read_table(path, memory_map=True)
        columns = {name: table.column(name) for name in (*TEXTS, *NUMBERS, *TOKENS, *PER_POSITION, *PER_TOP)}
    except (OSError, KeyError, pa.ArrowException) as error:
        raise not_a_recording(path.parent, f"{path.name} is damaged: {error}") from error
    return [_row(columns, index, top_m) for index in range(len(table))]


def _row(columns: Mapping[str, Any], index: int, top_m: int) -> RecordedRequest:
    values: dict[str, Any] = {name: columns[name][index].as_py() for name in (*TEXTS, *NUMBERS)}
    values |= {name: tuple(columns[name][index].as_py()) for name in TOKENS}
    values |= {name: _tensor(columns[name][index]) for name in PER_POSITION}
    values |= {name: _tensor(columns[name][index]).reshape(-1, top_m or 1)[:, :top_m] for name in PER_TOP}
    if not top_m:
        values |= {name: values[name].new_zeros(len(values["token_ids"]), 0) for name in PER_TOP}
    return RecordedRequest(**(values | {"top_ids": values["top_ids"].to(torch.int64)}))


def _tensor(cell: Any) -> Tensor:
    return torch.from_numpy(np.array(cell.values.to_numpy(zero_copy_only=False)))


def read_tensor(folder: Path, number: int, name: str) -> Tensor | None:
    """One tensor of a shard; None if it was not recorded. Raises ConfigError SD-E244 if the file is damaged."""
    path = tensors_path(folder, number)
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor | None = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise not_a_recording(folder, f"{path.name} is damaged: {error}") from error
    return tensor
