"""Recordings as training data: read back by ourselves, and by the trainers' own readers where they are installed."""

import json

import pyarrow as pa
import pytest
import torch
from recordings import make, shared
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec.core.config.engine_config import EngineConfig
from specdec.core.model.model_support import locate_model
from specdec.lab.recording import Recording
from specdec.lab.recording.foreign import import_data
from specdec.lab.training import specforge
from specdec.lab.training.data import export_data
from specdec.lab.training.row import TrainingRow
from specdec.sdk import ConfigError

LAYERS = (2, 4, 5, 8, "final")  # the packaged target has 8 layers
TINY = EngineConfig(model="tiny", device="cpu")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return make(tmp_path_factory.mktemp("recorded") / "x", hidden_states=LAYERS)


def test_speculators_data_is_read_back_with_the_recorded_tokens_and_states(tmp_path, recording):
    done = export_data(recording, tmp_path / "data", "speculators")
    assert (done.num_rows, done.layers) == (3, (2, 4, 5, 8))
    import_data(tmp_path / "data", TINY, done.layers, tmp_path / "x")
    same_requests(Recording.open(tmp_path / "x"), recording, columns=4)


@pytest.mark.parametrize(
    ("drafter", "compress", "columns"),
    [("eagle3", False, (0, 1, 2, 4)), ("eagle3", True, (0, 1, 2, 4)), ("dspark", False, (0, 1, 2, 4))],
)
def test_specforge_data_is_read_back_with_the_recorded_tokens_and_states(
    tmp_path, recording, drafter, compress, columns
):
    export_data(recording, tmp_path / "data", "specforge", drafter=drafter, compress=compress)
    assert (tmp_path / "data" / "rows_0-2000" / f"data_0.ckpt{'.gz' * compress}").is_file()
    import_data(tmp_path / "data", TINY, (2, 4, 5, "final"), tmp_path / "x")
    same_requests(Recording.open(tmp_path / "x"), recording, columns)


def same_requests(found, recording, columns):
    for one, other in zip(found, recording, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.token_ids == other.token_ids[: len(one.token_ids)]
        assert len(other.token_ids) - len(one.token_ids) <= 2
        recorded = recording.hidden_states(other.request_id).unflatten(1, (len(LAYERS), -1))
        chosen = recorded[:, :columns] if isinstance(columns, int) else recorded[:, list(columns)]
        states = found.hidden_states(one.request_id)
        assert torch.equal(states, chosen.flatten(1)[: len(states)])


@pytest.mark.parametrize(
    ("drafter", "layers", "last"),
    [
        ("eagle3", "aux_hidden_state", "hidden_state"),
        ("dflash", "hidden_states", None),
        ("dspark", "hidden_states", "target_last_hidden_states"),
    ],
)
def test_files_of_specforge_have_the_names_shapes_and_dtypes_that_its_trainer_indexes(
    tmp_path, recording, drafter, layers, last
):
    """Its data set takes `[:max_len]` of tokens, and of states after `squeeze(0)`."""
    export_data(recording, tmp_path / "data", "specforge", drafter=drafter, layers=(4, 2))
    values = torch.load(tmp_path / "data" / "rows_0-2000" / "data_0.ckpt", weights_only=True)
    length = len(values["input_ids"])
    expected = {"input_ids": (length,), "loss_mask": (length,), layers: (1, length, 2 * 256)}
    expected |= {} if last is None else {last: (1, length, 256)}
    assert {name: tuple(each.shape) for name, each in values.items()} == expected
    assert values["input_ids"].dtype == values["loss_mask"].dtype == torch.int64
    assert values[layers].dtype == recording.hidden_states(next(iter(recording)).request_id).dtype


def test_specforge_has_2000_files_a_folder(tmp_path):
    row = TrainingRow([1], [1], torch.zeros(1, 2, 1))
    assert specforge.write(tmp_path, (row for _ in range(2001)), "eagle3", compress=False) == 2001
    assert [len(list(each.iterdir())) for each in sorted(tmp_path.iterdir())] == [2000, 1]


def test_the_last_state_of_each_format_says_the_recorded_tokens(tmp_path, recording):
    """speculators applies the target's final norm to it; SpecForge has it applied already."""
    target = AutoModelForCausalLM.from_pretrained(locate_model("tiny"), dtype=torch.float32)
    export_data(recording, tmp_path / "a", "speculators")
    export_data(recording, tmp_path / "b", "specforge")
    values = torch.load(tmp_path / "b" / "rows_0-2000" / "data_0.ckpt", weights_only=True)
    ids, trained = values["input_ids"], values["loss_mask"].bool()
    before = load_file(tmp_path / "a" / "hidden_states" / "hs_0.safetensors")["hidden_states"][:, -1].float()
    for final in (target.model.norm(before), values["hidden_state"][0].float()):
        said = target.lm_head(final).argmax(-1)[:-1]
        assert torch.equal(said[trained[1:]], ids[1:][trained[1:]])


def test_token_frequencies_are_of_what_the_target_said(tmp_path, recording):
    export_data(recording, tmp_path / "data", "speculators")
    with pa.memory_map(str(tmp_path / "data" / "data-00000-of-00001.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    said = [token for row in rows for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True) if trained]
    counts = torch.load(tmp_path / "data" / "token_freq.pt", weights_only=True)
    assert sum(counts.values()) == len(said)
    assert counts[said[0]] == said.count(said[0])


def test_without_hidden_states_speculators_gets_whole_texts(tmp_path):
    recording = make(tmp_path / "x", num_prompts=1, output_len=4)
    assert export_data(recording, tmp_path / "data", "speculators").layers == ()
    with pytest.raises(ConfigError, match="states that specforge trains on") as raised:
        export_data(recording, tmp_path / "other", "specforge")
    assert raised.value.code == "SD-E272"


def test_what_is_missing_is_named_before_a_folder_is_made(tmp_path):
    with pytest.raises(ConfigError, match="--hidden-states 2,4,5,8") as raised:
        export_data(shared(), tmp_path / "data", "speculators")
    assert raised.value.code == "SD-E272"
    assert not (tmp_path / "data").exists()


def test_texts_that_end_at_once_give_nothing_to_train_on(tmp_path):
    recording = make(tmp_path / "x", num_prompts=1, output_len=1, hidden_states=LAYERS)
    with pytest.raises(ConfigError) as raised:
        export_data(recording, tmp_path / "data", "speculators")
    assert raised.value.code == "SD-E273"
    assert not (tmp_path / "data").exists()


def test_a_folder_with_files_is_left_alone(tmp_path, recording):
    (tmp_path / "mine").write_text("here")
    with pytest.raises(ConfigError) as raised:
        export_data(recording, tmp_path, "speculators")
    assert raised.value.code == "SD-E274"
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, recording):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/data") as raised:
        export_data(recording, tmp_path / "file" / "data", "speculators")
    assert raised.value.code == "SD-E275"


def test_the_reader_of_speculators_gives_the_recorded_states(tmp_path, recording):
    data = pytest.importorskip("speculators.train.data", reason="speculators is not installed")
    export_data(recording, tmp_path / "data", "speculators")
    found = data.ArrowDataset(512, tmp_path / "data", on_missing="raise")
    assert len(found) == 3
    for index, request in enumerate(recording):
        row = found[index]
        ids = [*request.prompt_token_ids, *request.token_ids][: len(row["input_ids"])]
        assert row["input_ids"].tolist() == ids
        assert row["loss_mask"].tolist() == [int(at >= len(request.prompt_token_ids)) for at in range(len(ids))]
        states = recording.hidden_states(request.request_id)
        assert torch.equal(row["hidden_states"], states[:, : 3 * 256])
        assert torch.equal(row["verifier_last_hidden_states"], states[:, 3 * 256 : 4 * 256])


def test_files_are_described_as_datasets_describes_them(tmp_path, recording):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    export_data(recording, tmp_path / "ours", "speculators")
    theirs = datasets.Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1], "seq_len": 2}])
    theirs.set_format("torch")
    theirs.save_to_disk(tmp_path / "theirs")
    for name in ("state.json", "dataset_info.json"):
        one, other = (json.loads((tmp_path / folder / name).read_text()) for folder in ("ours", "theirs"))
        assert {**one, "_fingerprint": ""} == {**other, "_fingerprint": ""}
    schemas = []
    for folder in ("ours", "theirs"):
        with pa.memory_map(str(tmp_path / folder / "data-00000-of-00001.arrow")) as file:
            schemas.append(pa.ipc.open_stream(file).schema)
    assert schemas[0].equals(schemas[1], check_metadata=False)
    features = [json.loads(each.metadata[b"huggingface"])["info"]["features"] for each in schemas]
    assert features[0] == features[1]
