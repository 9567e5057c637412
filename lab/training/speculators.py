"""Data for the trainer of speculators (https://github.com/vllm-project/speculators).

`datasets` loads the folder from the disk: an Arrow stream, and two files that describe it. Hidden states lie beside it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..recording.shards import pyarrow
from .row import TrainingRow

ARROW = "data-00000-of-00001.arrow"
FEATURES: dict[str, Any] = {  # with the types that `datasets` itself gives columns of these names
    "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "_type": "List"},
    "loss_mask": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"},
    "seq_len": {"dtype": "int64", "_type": "Value"},
}
INFO = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
STATE: dict[str, Any] = {
    "_data_files": [{"filename": ARROW}],
    "_fingerprint": "specdec",
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": "torch",
    "_output_all_columns": False,
    "_split": None,
}


def write(folder: Path, rows: Iterable[TrainingRow]) -> int:
    """Write the data set into an empty folder. Returns how many rows there are. Raises OSError."""
    pa = pyarrow()
    columns = {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int64()), "seq_len": pa.int64()}
    schema = pa.schema(columns, {"huggingface": json.dumps({"info": {"features": FEATURES}})})
    counts: Counter[int] = Counter()
    number = -1
    (folder / "hidden_states").mkdir()
    with pa.OSFile(str(folder / ARROW), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number, row in enumerate(rows):
            line = {"input_ids": row.input_ids, "loss_mask": row.loss_mask, "seq_len": len(row.input_ids)}
            stream.write_batch(pa.RecordBatch.from_pylist([line], schema=schema))
            counts.update(token for token, trained in zip(row.input_ids, row.loss_mask, strict=True) if trained)
            if row.states is not None:
                tensors = {"token_ids": torch.tensor(row.input_ids), "hidden_states": row.states.contiguous()}
                save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
    torch.save(dict(counts), folder / "token_freq.pt")
    (folder / "dataset_info.json").write_text(json.dumps(INFO, indent=2), encoding="utf-8")
    (folder / "state.json").write_text(json.dumps(STATE, indent=2), encoding="utf-8")
    return number + 1
