"""A shard: requests as rows of a Parquet file, and beside it their hidden states and logits in safetensors.

A third file has the SHA-256 of both, as `sha256sum` writes and checks them. A shard counts once its Parquet file has
its name. That file comes last, so a shard that was torn has none.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.sdk import ConfigError
from specdec.sdk.json_files import read_text
from specdec.sdk.structured_outputs import StructuredOutputs

from .manifest import not_a_recording
from .request import RecordedRequest

TEXTS = ("request_id", "prompt_id", "category", "prompt", "text", "finish_reason")
NUMBERS = ("number", "turn", "seed")
TOKENS = ("prompt_token_ids", "token_ids", "past_token_ids")
PER_POSITION = ("token_logprobs", "tail_mass", "entropy")
PER_TOP = ("top_ids", "top_logprobs")
FORM = "structured_outputs"  # as JSON; null: none
HIDDEN, LOGITS = "hidden_states", "logits"
_NAME = re.compile(r"shard-(\d{5}|[1-9]\d{5,8})\.(parquet|safetensors|sha256)(\.tmp)?")

logger = logging.getLogger("specdec")


def pyarrow() -> Any:
    """The library, with `parquet`. Raises ConfigError SD-E243 where it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        facts = {"because": str(error), "fix": 'pip install "specdec-sdk[lab]"'}
        raise ConfigError("SD-E243", "recordings are Parquet files, and pyarrow is not installed", facts) from error
    return pyarrow


def shard_path(folder: Path, number: int, kind: str) -> Path:
    """Where the rows ("parquet"), the tensors ("safetensors") or the checksums ("sha256") of a shard lie."""
    return folder / f"shard-{number:05}.{kind}"


def shard_files(folder: Path) -> dict[Path, int]:
    """Every file in a recording that has the name of a shard's part, torn or whole, with the shard's number."""
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("shard-*")))
    return {path: int(name[1]) for path, name in named if name and (path.is_symlink() or path.is_file())}


def tensor_name(kind: str, request_id: str) -> str:
    """The name of a request's hidden states or logits within a shard."""
    return f"{kind}/{request_id}"


def write_shard(
    folder: Path, number: int, requests: Sequence[RecordedRequest], tensors: Mapping[str, Tensor], room: int | None
) -> int:
    """Write a shard whole or not at all. Returns its bytes. Raises OSError; parts of it are removed then.

    room: most bytes that it may have. None means as many as the disk takes.
    """
    rows, states, sums = (shard_path(folder, number, kind) for kind in ("parquet", "safetensors", "sha256"))
    files = [states, sums, rows] if tensors else [sums, rows]
    parts = {path: path.with_name(f"{path.name}.tmp") for path in files}
    try:
        if tensors:
            _save_tensors(tensors, parts[states])
        pyarrow().parquet.write_table(_table(requests), parts[rows])
        lines = [f"{_sha256(parts[path])}  {path.name}\n" for path in files if path != sums]
        parts[sums].write_text("".join(lines), encoding="utf-8")
        num_bytes = sum(part.stat().st_size for part in parts.values())
        if room is not None and num_bytes > room:
            raise OSError(errno.EFBIG, f"the next shard has {num_bytes} bytes, and max_disk leaves {room}")
        for path, part in parts.items():
            os.replace(part, path)
    except BaseException:
        for path in (*parts.values(), *(() if rows.exists() else files)):
            path.unlink(missing_ok=True)
        raise
    return num_bytes


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums_of(folder: Path, number: int) -> dict[str, str]:
    """The SHA-256 of each file of a shard by its name. Raises ConfigError SD-E244 if they cannot be read."""
    path = shard_path(folder, number, "sha256")
    with reading(path):
        return {name: digest for digest, name in (line.split("  ") for line in read_text(path).splitlines())}


def require_whole(path: Path, sums: Mapping[str, str]) -> None:
    """Raise ConfigError SD-E244 unless a file is as it was written. sums: see `sums_of`."""
    expected = sums.get(path.name)
    with reading(path):
        found = _sha256(path) if path.exists() or expected is not None else None
    if found != expected:
        raise not_a_recording(path.parent, f"{path.name} is damaged: it is not what was written (SHA-256)", REPAIR)


REPAIR = "delete the files of this shard, and run the same `specdec record` again: only its requests run"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes the readers raise into ConfigError SD-E244."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise not_a_recording(path.parent, f"{path.name} is damaged: {error}", REPAIR) from error


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    except SafetensorError as error:  # of the disk: it has no class of its own
        raise OSError(None, str(error)) from error


def _table(requests: Sequence[RecordedRequest]) -> Any:
    pa = pyarrow()
    types = {name: pa.string() for name in (*TEXTS, FORM)} | {name: pa.int64() for name in NUMBERS}
    types |= {name: pa.list_(pa.int32()) for name in (*TOKENS, "top_ids")}
    types |= {name: pa.list_(pa.float32()) for name in (*PER_POSITION, "top_logprobs")}
    columns = {name: [_plain(getattr(each, name)) for each in requests] for name in types}
    return pa.table({name: pa.array(columns[name], kind) for name, kind in types.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return value.model_dump_json(by_alias=True, exclude_defaults=True)
    return value.reshape(-1).numpy() if isinstance(value, Tensor) else value


def read_shard(path: Path, top_m: int) -> list[RecordedRequest]:
    """All rows of a shard's Parquet file. Raises ConfigError SD-E244 if it is damaged."""
    pa = pyarrow()
    with reading(path):
        table = pa.parquet.read_table(path, memory_map=True, partitioning=None)
        columns = {name: table.column(name) for name in (*TEXTS, *NUMBERS, *TOKENS, *PER_POSITION, *PER_TOP)}
        return [_row(columns, index, top_m, form) for index, form in enumerate(table.column(FORM).to_pylist())]


def _row(columns: Mapping[str, Any], index: int, top_m: int, form: str | None) -> RecordedRequest:
    """Raises ValueError and others for what is no request."""
    values: dict[str, Any] = {name: columns[name][index].as_py() for name in (*TEXTS, *NUMBERS)}
    values |= {name: tuple(columns[name][index].as_py()) for name in TOKENS}
    length = len(values["token_ids"])
    for name in PER_POSITION:
        values[name] = _tensor(columns[name][index]).to(torch.float32).view(length)
    for name in PER_TOP:
        dtype = torch.int64 if name == "top_ids" else torch.float32
        flat = _tensor(columns[name][index]).to(dtype)
        values[name] = flat.view(length, top_m) if top_m else flat.new_zeros(length, 0)
    _require_kinds(values)
    if top_m:
        _require_numbers(values)
    return RecordedRequest(**values, structured_outputs=None if form is None else _form(form))


def _form(text: str) -> StructuredOutputs:
    try:
        return StructuredOutputs.parse(json.loads(text), FORM)
    except ConfigError as error:
        raise ValueError(error.summary) from error


def _require_kinds(values: Mapping[str, Any]) -> None:
    kinds = dict.fromkeys(TEXTS, str) | dict.fromkeys(NUMBERS, int)
    if values["prompt"] is None:
        del kinds["prompt"]
    wrong = [name for name, kind in kinds.items() if type(values[name]) is not kind]
    wrong += [name for name in TOKENS if not all(type(token) is int and token >= 0 for token in values[name])]
    if wrong:
        raise ValueError(f"{wrong[0]} of a request is of another kind")


def _require_numbers(values: Mapping[str, Any]) -> None:
    wrong = [name for name in ("top_logprobs", "token_logprobs", "tail_mass") if values[name].isnan().any()]
    if wrong:
        raise ValueError(f"{wrong[0]} of a request holds what is no number")


def _tensor(cell: Any) -> Tensor:
    return torch.from_numpy(np.array(cell.values.to_numpy(zero_copy_only=False)))


def read_tensor(folder: Path, number: int, name: str) -> Tensor | None:
    """One tensor of a shard; None if it was not recorded. Raises ConfigError SD-E244 if the file is damaged."""
    path = shard_path(folder, number, "safetensors")
    if not path.exists():
        return None
    with reading(path), safe_open(path, framework="pt") as file:
        return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
