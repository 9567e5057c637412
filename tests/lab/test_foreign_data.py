"""Training data of speculators and SpecForge as recordings. The files are written by hand, as their formats say."""

import gzip

import pyarrow as pa
import pytest
import torch
from recordings import drafts_at, shared
from safetensors.torch import save_file

from specdec.core.config.engine_config import EngineConfig
from specdec.lab.recording import Recording
from specdec.lab.recording.foreign import import_data
from specdec.lab.replay.run import replay
from specdec.sdk import ConfigError

LAYERS = (2, 4, 5, "final")
H = 256
TINY = EngineConfig(model="tiny", device="cpu")


def texts():
    """The recorded texts, without the last token: nothing is known of its state."""
    recording = shared()
    for request in recording:
        states = recording.hidden_states(request.request_id)
        ids = [*request.prompt_token_ids, *request.token_ids][: len(states)]
        mask = [0] * len(request.prompt_token_ids) + [1] * (len(ids) - len(request.prompt_token_ids))
        yield ids, mask, states


def write_speculators(folder, rows):
    (folder / "hidden_states").mkdir(parents=True)
    columns = [{"input_ids": ids, "loss_mask": mask, "seq_len": len(ids)} for ids, mask, _ in rows]
    table = pa.Table.from_pylist(columns)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    for index, (ids, _, states) in enumerate(rows):
        tensors = {"token_ids": torch.tensor(ids), "hidden_states": states.view(len(ids), len(LAYERS), H)}
        save_file(tensors, folder / "hidden_states" / f"hs_{index}.safetensors")


def write_specforge(folder, rows, suffix=".ckpt"):
    (folder / "rows_0-2000").mkdir(parents=True)
    for index, (ids, mask, states) in enumerate(rows):
        values = {
            "input_ids": torch.tensor(ids),
            "loss_mask": torch.tensor(mask),
            "hidden_state": states[None, :, -H:],
            "aux_hidden_state": states[None, :, :-H],
        }
        path = folder / "rows_0-2000" / f"data_{index}{suffix}"
        with gzip.open(path, "wb") if suffix.endswith(".gz") else path.open("wb") as file:
            torch.save(values, file)


def write_gzipped(folder, rows):
    write_specforge(folder, rows, ".ckpt.gz")


@pytest.mark.parametrize("write", [write_speculators, write_specforge, write_gzipped])
def test_a_head_replays_training_data_as_it_replays_a_recording(tmp_path, write):
    rows = list(texts())
    write(tmp_path / "data", rows)
    import_data(tmp_path / "data", TINY, LAYERS, tmp_path / "x")
    found = Recording.open(tmp_path / "x")
    assert [[*each.prompt_token_ids, *each.token_ids] for each in found] == [ids for ids, _, _ in rows]
    assert found.manifest.top_m == 0
    asked = {"model": "tiny/eagle3", "num_speculative_tokens": 3}
    both = (drafts_at(replay(recording, asked)).items() for recording in (found, shared()))
    steps, first = (sorted((position, drafts) for (_, position), drafts in each if position < 12) for each in both)
    assert steps == first


def test_neighbouring_tokens_that_are_trained_on_are_a_request(tmp_path):
    write_speculators(tmp_path / "data", [([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1], torch.zeros(6, 4 * H))])
    import_data(tmp_path / "data", TINY, (), tmp_path / "x")
    said = [(each.request_id, each.prompt_token_ids, each.token_ids) for each in Recording.open(tmp_path / "x")]
    assert said == [("0", (5,), (6, 7)), ("0/2", (5, 6, 7, 8), (9, 10))]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "data-00000-of-00001.arrow").write_bytes(b"broken"), "data-00000"),
        (lambda folder: (folder / "data-00000-of-00001.arrow").unlink(), "neither"),
        (lambda folder: (folder / "hidden_states" / "hs_0.safetensors").write_bytes(b"broken"), "hs_0"),
        (lambda folder: (folder / "hidden_states" / "hs_0.safetensors").unlink(), "row 1"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, change, named):
    write_speculators(tmp_path / "data", [([5, 6, 7], [0, 1, 1], torch.zeros(3, 4 * H))])
    change(tmp_path / "data")
    with pytest.raises(ConfigError, match=named) as raised:
        import_data(tmp_path / "data", TINY, LAYERS, tmp_path / "x")
    assert raised.value.code == "SD-E250"


@pytest.mark.parametrize("token_id", [-1, 2**20, 2**40, 5.5])
def test_ids_that_are_none_of_the_target_are_refused(tmp_path, token_id):
    folder = tmp_path / "data" / "rows_0-2000"
    folder.mkdir(parents=True)
    torch.save({"input_ids": torch.tensor([1, token_id]), "loss_mask": torch.tensor([0, 1])}, folder / "data_0.ckpt")
    with pytest.raises(ConfigError, match=r"(?s)data_0\.ckpt.*input_ids") as raised:
        import_data(tmp_path / "data", TINY, (), tmp_path / "x")
    assert raised.value.code == "SD-E250"


def test_data_that_is_larger_than_max_disk_is_refused(tmp_path):
    write_speculators(tmp_path / "data", [([5, 6, 7], [0, 1, 1], torch.zeros(3, 4 * H))])
    with pytest.raises(ConfigError, match="max_disk") as raised:
        import_data(tmp_path / "data", TINY, LAYERS, tmp_path / "x", max_disk=100)
    assert raised.value.code == "SD-E248"


def test_layers_that_do_not_fit_are_named(tmp_path):
    write_speculators(tmp_path / "data", [([5, 6, 7], [0, 1, 1], torch.zeros(3, 4 * H))])
    with pytest.raises(ConfigError, match="expected with 512 numbers a token, and there are 1024") as raised:
        import_data(tmp_path / "data", TINY, (2, "final"), tmp_path / "x")
    assert raised.value.code == "SD-E250"


def test_a_checkpoint_without_a_loss_mask_is_named(tmp_path):
    folder = tmp_path / "data" / "rows_0-2000"
    folder.mkdir(parents=True)
    torch.save({"input_ids": torch.tensor([1, 2])}, folder / "data_0.ckpt")
    with pytest.raises(ConfigError, match=r"data_0\.ckpt.*cannot be read\n.*no loss_mask") as raised:
        import_data(tmp_path / "data", TINY, (), tmp_path / "x")
    assert raised.value.code == "SD-E250"
