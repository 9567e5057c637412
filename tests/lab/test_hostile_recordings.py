"""A recording is what was written or is refused by name; whatever lies in its folder, nothing else is touched."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hostile import NOT_JSON, changed, flip, tree
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.core.registry import PluginSettings
from specdec.lab.recording import Cost, Manifest, RecordedRequest, Recording, RecordingWriter
from specdec.lab.replay.rows import recorded_cell
from specdec.lab.replay.run import replay
from specdec.sdk import ConfigError, SpecdecError

TARGET = {
    "model": "tiny",
    "checkpoint_dir": None,
    "config": {"model_type": "qwen3"},
    "vocab_size": 4096,
    "hidden_size": 8,
    "num_layers": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 2,
    "block_size": 16,
}
MANIFEST = Manifest(
    model="tiny",
    top_m=2,
    hidden_states=(1, "final"),
    full_logits=True,
    target=TARGET,
    engine={"max_num_seqs": 2, "block_size": 16, "max_model_len": 64, "seed": 0},
    sampling={"temperature": 0.0, "max_tokens": 8},
    cost=Cost(rows=(1, 4), seconds=(1.0, 2.0)),
)


def request(number: int, length: int = 6) -> RecordedRequest:
    return RecordedRequest(
        request_id=f"r{number}",
        number=number,
        prompt_id=f"r{number}",
        turn=0,
        category="c",
        prompt=None if number else "é",
        text="t",
        seed=0,
        prompt_token_ids=(1, 2, 1, 2, 1, 2),
        token_ids=tuple([1, 2] * (length // 2)),
        past_token_ids=(),
        finish_reason="length",
        top_ids=torch.arange(2 * length).view(length, 2),
        top_logprobs=torch.full((length, 2), -1.0),
        token_logprobs=torch.full((length,), -1.0),
        tail_mass=torch.full((length,), 0.1),
        entropy=torch.full((length,), 1.0),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A recording in two shards."""
    folder = tmp_path_factory.mktemp("written") / "recording"
    writer = RecordingWriter(folder, MANIFEST)
    for number in range(2):
        writer.add(request(number), torch.rand(11, 16), torch.rand(6, 11))
        writer.flush()
    writer.finish()
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "recording")


def read(folder: Path) -> int:
    """Everything that it holds, and a replay of it."""
    recording = Recording.open(folder)
    for each in recording:
        recording.hidden_states(each.request_id)
        recording.logits(each.request_id)
    replay(recording, {"method": "ngram", "num_speculative_tokens": 3}, PluginSettings())
    return len(recording)


def refusal(folder: Path) -> str | None:
    """The code of the error that reading ends in."""
    try:
        read(folder)
    except SpecdecError as error:
        return error.code
    return None


def test_a_recording_is_read_and_replayed(folder):
    assert read(folder) == 2


FILES = [f"shard-0000{number}.{kind}" for number in range(2) for kind in ("parquet", "safetensors", "sha256")]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_of_a_shard_is_found(written, tmp_path_factory, name, place, mask):
    folder = shutil.copytree(written, tmp_path_factory.mktemp("flip") / "recording")
    flip(folder / name, place, mask)
    sums = name.endswith("sha256")  # a space of another kind between them says the same
    assume(not sums or (folder / name).read_bytes().split() != (written / name).read_bytes().split())
    with pytest.raises(ConfigError, match=rf"(?s)SD-E244.*{name.partition('.')[0]}.*delete the files of this shard"):
        read(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_shard_that_was_cut_short_is_found(name, size, folder):
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:size])
    assert refusal(folder) == "SD-E244"


def test_tensors_that_are_gone_or_of_another_shard_are_found(folder):
    (folder / "shard-00000.safetensors").rename(folder / "kept")
    assert refusal(folder) == "SD-E244"
    shutil.copy(folder / "shard-00001.safetensors", folder / "shard-00000.safetensors")
    assert refusal(folder) == "SD-E244"


def test_only_the_requests_of_a_deleted_shard_are_missing(folder):
    for name in FILES[:3]:
        (folder / name).unlink()
    assert RecordingWriter(folder, MANIFEST).done == {"r1"}


def test_a_shard_without_checksums_is_found(folder):
    (folder / "shard-00001.sha256").unlink()
    assert refusal(folder) == "SD-E244"


@settings(max_examples=150, deadline=None)
@given(NOT_JSON | changed(MANIFEST.model_dump(mode="json")).map(json.dumps).map(str.encode))
def test_no_manifest_makes_a_reader_raise_what_is_not_ours(written, tmp_path_factory, text):
    home = tmp_path_factory.mktemp("home")
    folder = shutil.copytree(written, home / "recording")
    (folder / "manifest.json").write_bytes(text)
    before = tree(home)
    refusal(folder)
    assert tree(home) == before
    shutil.rmtree(home)


HOSTILE_CELLS = [None, "", "x", -1, 2**40, [], [None], ["x"], [-1], [2**40], [1.5], [[1]], {"a": 1}]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_row_makes_a_reader_raise_what_is_not_ours(written, tmp_path_factory, data):
    folder = shutil.copytree(written, tmp_path_factory.mktemp("rows") / "recording")
    path = folder / "shard-00000.parquet"
    table = pq.read_table(path)
    name = data.draw(st.sampled_from(table.column_names))
    cell = data.draw(st.sampled_from(HOSTILE_CELLS))
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, name, pa.array([cell])), path)
    sums = folder / "shard-00000.sha256"
    *others, _ = sums.read_text().splitlines()
    sums.write_text("\n".join([*others, f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"]))
    refusal(folder)


def test_going_on_with_a_recording_removes_torn_parts_of_shards_and_nothing_else(folder, tmp_path):
    mine = ["shard-notes.txt", "shard-x.parquet", "shard-1.safetensors.tmp", "shard-000002.safetensors", "shards"]
    for name in mine:
        (folder / name).write_text("mine")
    (folder / "shard-00009.parquet.tmp").mkdir()
    (folder / "shard-00009.parquet.tmp" / "letter").write_text("mine")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("shard-00002.safetensors", "shard-00002.parquet.tmp", "manifest.json.tmp"):
        (folder / name).symlink_to(victim)
    writer = RecordingWriter(folder, MANIFEST)
    writer.add(request(2), torch.rand(11, 16))
    writer.finish()
    assert victim.read_text() == "mine"
    assert all((folder / name).read_text() == "mine" for name in mine)
    assert (folder / "shard-00009.parquet.tmp" / "letter").read_text() == "mine"
    assert not (folder / "shard-00002.parquet.tmp").is_symlink()
    assert len(Recording.open(folder)) == 3


@pytest.mark.parametrize("key", ["self", "cls", "values", "where"])
def test_a_key_with_the_name_of_an_argument_is_a_key_like_any_other(key, folder):
    values = json.loads((folder / "manifest.json").read_text()) | {key: 1}
    (folder / "manifest.json").write_text(json.dumps(values))
    assert refusal(folder) == "SD-E131"


@pytest.mark.parametrize("cost", [{"rows": [1], "seconds": [0.0]}, {"rows": [1], "seconds": [1e308]},
                                  {"rows": [10**400], "seconds": [1.0]}])  # fmt: skip
def test_a_cost_that_no_step_has_is_refused(cost, folder):
    values = json.loads((folder / "manifest.json").read_text()) | {"cost": cost}
    (folder / "manifest.json").write_text(json.dumps(values))
    assert refusal(folder) == "SD-E132"


def test_a_damaged_tokenizer_is_found(folder):
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"(?s)SD-E244.*the folder tokenizer is damaged"):
        read(folder)


@pytest.mark.parametrize("name", ["top_logprobs", "token_logprobs", "tail_mass"])
def test_probabilities_that_are_no_numbers_are_found(tmp_path, name):
    whole = request(0)
    holed = getattr(whole, name).clone()
    holed.view(-1)[1] = torch.nan
    writer = RecordingWriter(tmp_path / "x", MANIFEST)
    writer.add(replace(whole, **{name: holed}), torch.rand(11, 16), torch.rand(6, 11))
    writer.finish()
    with pytest.raises(ConfigError, match=rf"SD-E244.*\n.*{name} of a request holds what is no number"):
        read(tmp_path / "x")


def test_a_recording_that_does_not_say_its_dataset_is_named_recording(folder):
    assert recorded_cell(Recording.open(folder))["configuration"]["dataset_name"] == "recording"
