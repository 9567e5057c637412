"""Training data of other projects as recordings: speculators' Arrow data sets, SpecForge's checkpoints.

A row is a text with a loss mask. Tokens in a row that are trained on are one recorded request, and everything
before it is its prompt. Nobody knows probabilities there, nor what a step cost.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.device import device_of, profile_of
from specdec.core.engine.plan import target_info
from specdec.core.model.hidden_states import HiddenState
from specdec.core.model.model_class import text_config
from specdec.core.model.model_support import locate_model
from specdec.core.model.target import load_config
from specdec.core.model.tokenizer import load_tokenizer
from specdec.sdk import ConfigError

from . import fingerprint
from .manifest import Manifest, plain
from .request import RecordedRequest
from .shards import pyarrow
from .writer import RecordingWriter, reserved

SPECULATORS, SPECFORGE = "speculators", "specforge"
CHECKPOINTS = ("*.ckpt", "*.ckpt.gz")


@dataclass(frozen=True)
class ForeignRow:
    """A text of T tokens."""

    where: str
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T], 1 where the target speaks
    hidden: Tensor | None  # [T, L*H]


def import_data(
    source: Path,
    config: EngineConfig,
    hidden_states: Sequence[HiddenState],
    folder: Path,
    *,
    max_disk: int | None = None,
) -> Manifest:
    """Write a recording of a data set that was made for the target of `config`. Its weights are not loaded.

    hidden_states: the layers that the data set holds, in their order. Empty means that states are left out.
    max_disk: as of `RecordingWriter`.

    Raises ConfigError: SD-E250 for data that cannot be read, SD-E187, SD-E243, SD-E247 and SD-E248 of the folder.
    """
    kind = SPECFORGE if any(any(source.rglob(pattern)) for pattern in CHECKPOINTS) else SPECULATORS
    manifest, tokenizer = target_manifest(config, kind, str(source), tuple(hidden_states))
    with reserved(folder):
        writer = RecordingWriter(folder, manifest, max_disk=max_disk)
        _write(source, kind, writer, tokenizer)
        return writer.finish()


def _write(source: Path, kind: str, writer: RecordingWriter, tokenizer: Any) -> None:
    """Add every request of a data set."""
    manifest = writer.manifest
    size = int(manifest.target["hidden_size"]) * len(manifest.hidden_states)
    number = 0
    vocab_size = int(manifest.target["vocab_size"])
    for index, row in enumerate(_specforge(source) if kind == SPECFORGE else _speculators(source)):
        unknown = [each for each in row.token_ids if not 0 <= each < vocab_size]
        if unknown:
            raise _unreadable(row.where, f"the target has token ids 0 to {vocab_size - 1}, and input_ids {unknown[0]}")
        for turn, (start, stop) in enumerate(_spoken(row)):
            request = _request(row, index, turn, number, (start, stop), tokenizer)
            number += 1
            if request.request_id not in writer.done:
                writer.add(request, _states(row, stop, size) if size else None)
    if not number:
        raise _unreadable(source, "it holds no row with a token to train on")


def _speculators(source: Path) -> Iterator[ForeignRow]:
    """`datasets` writes Arrow streams; hidden states lie beside them, by the number of the row."""
    pa = pyarrow()
    files = sorted(source.glob("*.arrow"))
    if not files:
        raise _unreadable(source, "there are neither *.arrow files nor *.ckpt files")
    index = 0
    for file in files:
        try:
            with pa.memory_map(str(file)) as mapped:
                rows = pa.ipc.open_stream(mapped).read_all().to_pylist()
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(file, str(error)) from error
        for row in rows:
            where = f"{file}, row {index + 1}"
            states = source / "hidden_states" / f"hs_{index}.safetensors"
            yield _row(where, row, _speculators_states(states, row) if states.is_file() else None)
            index += 1


def _speculators_states(path: Path, row: Mapping[str, Any]) -> Tensor:
    try:
        tensors = load_file(path)
        token_ids = tensors["token_ids"].tolist()
        states: Tensor = tensors["hidden_states"].flatten(1)
    except (OSError, SafetensorError, KeyError, IndexError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if token_ids != row.get("input_ids"):
        raise _unreadable(path, "token_ids are not the input_ids of its row")
    return states


def _specforge(source: Path) -> Iterator[ForeignRow]:
    """Folders of files by torch.save, of which each is one text."""
    for path in sorted(path for pattern in CHECKPOINTS for path in source.rglob(pattern)):
        try:
            data = path.read_bytes()
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes the reader raise
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if not isinstance(values, dict):
            raise _unreadable(path, f"expected a dictionary, found {type(values).__name__}")
        names = ("aux_hidden_state", "hidden_states", "hidden_state", "target_last_hidden_states")
        states = [values[name] for name in names if values.get(name) is not None]
        flat = [each.reshape(-1, each.shape[-1]) for each in states]
        yield _row(str(path), values, torch.cat(flat, dim=1) if flat else None)


def _row(where: str, values: Mapping[str, Any], hidden: Tensor | None) -> ForeignRow:
    missing = [name for name in ("input_ids", "loss_mask") if values.get(name) is None]
    if missing:
        raise _unreadable(where, f"no {' and no '.join(missing)}; found {', '.join(map(str, values))}")
    try:
        both = [torch.as_tensor(values[name]).reshape(-1) for name in ("input_ids", "loss_mask")]
        if len(both[0]) and both[0].is_floating_point():
            raise TypeError(f"input_ids are of {both[0].dtype}")
        ids, mask = (tuple(each.to(torch.int64).tolist()) for each in both)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch: no numbers, or too large ones
        raise _unreadable(where, f"input_ids or loss_mask are no integers: {error}") from error
    if len(ids) != len(mask) or (hidden is not None and len(hidden) != len(ids)):
        states = "no" if hidden is None else len(hidden)
        raise _unreadable(where, f"{len(ids)} input_ids, {len(mask)} in loss_mask, {states} hidden states")
    return ForeignRow(where, ids, mask, hidden)


def _spoken(row: ForeignRow) -> Iterator[tuple[int, int]]:
    """Where the target speaks: first and last token, after a prompt of at least one."""
    place = 0
    for wanted, run in groupby(row.loss_mask):
        first, place = place, place + len(list(run))
        if wanted and place > max(first, 1):
            yield max(first, 1), place


def _states(row: ForeignRow, stop: int, size: int) -> Tensor:
    if row.hidden is None or row.hidden.shape[1] != size:
        found = "none" if row.hidden is None else f"{row.hidden.shape[1]} numbers a token"
        raise _unreadable(row.where, f"hidden states were expected with {size} numbers a token, and there are {found}")
    return row.hidden[: stop - 1].clone()


def _request(
    row: ForeignRow, index: int, turn: int, number: int, span: tuple[int, int], tokenizer: Any
) -> RecordedRequest:
    start, stop = span
    tokens = row.token_ids[start:stop]
    unknown = torch.full((len(tokens),), torch.nan)
    return RecordedRequest(
        request_id=f"{index}" if turn == 0 else f"{index}/{turn + 1}",
        number=number,
        prompt_id=str(index),
        turn=0,  # its prompt is known whatever was said before
        category="all",
        prompt=None,
        text="" if tokenizer is None else tokenizer.decode(list(tokens), skip_special_tokens=True),
        seed=0,
        prompt_token_ids=row.token_ids[:start],
        token_ids=tokens,
        past_token_ids=(),
        finish_reason="length",
        top_ids=torch.zeros(len(tokens), 0, dtype=torch.int64),
        top_logprobs=torch.zeros(len(tokens), 0),
        token_logprobs=unknown,
        tail_mass=unknown,
        entropy=unknown,
    )


def target_manifest(
    config: EngineConfig, kind: str, source: str, hidden_states: tuple[HiddenState, ...]
) -> tuple[Manifest, Any]:
    """What is known of a target without its weights, and its tokenizer."""
    path = locate_model(config.model)
    profile = profile_of(device_of(config.device), config.cpu_kernels)
    hf_config = load_config(path, trust_remote_code=config.trust_remote_code)
    dtype = profile.dtype(config.dtype, hf_config.dtype)
    info = target_info(config, path, text_config(hf_config), dtype, profile.device)
    tokenizer = load_tokenizer(config.tokenizer, path, trust_remote_code=config.trust_remote_code)
    manifest = Manifest(
        source=kind,
        model=str(config.model),
        model_fingerprint=fingerprint.of_model(info.checkpoint_dir, info.config),
        tokenizer_fingerprint=fingerprint.of_tokenizer(tokenizer),
        target=plain(asdict(info) | {"config": dict(info.config)}),
        engine={"max_num_seqs": config.max_num_seqs, "max_model_len": info.max_model_len},
        sampling={"temperature": 0.0},
        dataset={"dataset_name": kind, "dataset_path": source},
        hidden_states=hidden_states,
    )
    return manifest, tokenizer


def _unreadable(where: Path | str, because: str) -> ConfigError:
    facts = {"because": because, "looked for": "a data set of speculators, or a folder of SpecForge"}
    return ConfigError("SD-E250", f"the training data {str(where)!r} cannot be read", facts)
