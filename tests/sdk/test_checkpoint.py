"""A draft checkpoint before any weight is loaded: fields by path, shapes from headers, errors that name the place."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from specdec.sdk import ConfigError
from specdec.sdk.checkpoint import Checkpoint

CONFIG = {
    "hidden_size": 8,
    "rope_theta": 10000.0,
    "tie": True,
    "nothing": None,
    "nested": {"ids": [1, 2], "deep": {"name": "x"}},
}


def checkpoint_in(folder, config=CONFIG, **tensors):
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def refused(action):
    with pytest.raises(ConfigError) as caught:
        action()
    return caught.value


def test_opening_reads_the_configuration_and_nothing_else(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint.config == CONFIG
    assert checkpoint.config_file == tmp_path / "config.json"


@pytest.mark.parametrize(
    ("path", "kind", "value"),
    [
        ("hidden_size", int, 8),
        ("rope_theta", (int, float), 10000.0),
        ("tie", bool, True),
        ("nested.ids", list, [1, 2]),
        ("nested.deep.name", str, "x"),
    ],
)
def test_values_are_found_by_path(path, kind, value, tmp_path):
    assert checkpoint_in(tmp_path).get(path, kind) == value


@pytest.mark.parametrize("path", ["absent", "nothing", "nested.absent", "hidden_size.deeper", "absent.deeper"])
def test_what_is_absent_or_null_takes_the_default_or_is_named_with_its_file(path, tmp_path):
    checkpoint = checkpoint_in(tmp_path)
    assert checkpoint.get(path, int, 3) == 3
    assert checkpoint.get(path, int, None) is None
    error = refused(lambda: checkpoint.get(path, int))
    assert error.code == "SD-E170"
    assert error.facts["field"] == path
    assert error.facts["file"] == tmp_path / "config.json"


@pytest.mark.parametrize(
    ("path", "kind", "expected", "found"),
    [
        ("hidden_size", str, "str", "8"),
        ("tie", int, "int", "True"),
        ("rope_theta", int, "int", "10000.0"),
        ("nested", (list, str), "list or str", "{'ids': [1, 2], 'deep': {'name': 'x'}}"),
    ],
    ids=["number-for-text", "yes-for-a-number", "fraction-for-a-count", "object-for-a-list"],
)
def test_another_type_is_named_with_what_was_found(path, kind, expected, found, tmp_path):
    error = refused(lambda: checkpoint_in(tmp_path).get(path, kind, None))
    assert error.code == "SD-E171"
    assert (error.facts["expected"], error.facts["found"]) == (expected, found)


def test_shapes_come_from_every_safetensors_file(tmp_path):
    save_file({"b": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    checkpoint = checkpoint_in(tmp_path, a=torch.zeros(4), c=torch.zeros(()))
    assert checkpoint.shapes == {"a": (4,), "b": (2, 3), "c": ()}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "heads.pt"])
def test_shapes_come_from_what_torch_saved(name, tmp_path):
    torch.save({"a": torch.zeros(2, 5)}, tmp_path / name)
    assert checkpoint_in(tmp_path).shapes == {"a": (2, 5)}


def test_safetensors_are_preferred(tmp_path):
    torch.save({"a": torch.zeros(2, 5)}, tmp_path / "pytorch_model.bin")
    checkpoint = checkpoint_in(tmp_path, a=torch.zeros(3))
    assert [file.name for file in checkpoint.weight_files] == ["model.safetensors"]


def test_shapes_are_read_without_the_numbers(tmp_path):
    """A file of which only the header exists."""
    header = json.dumps({"a": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4_000_000]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4_000_000)
    assert checkpoint_in(tmp_path).shapes == {"a": (1000, 1000)}


def test_one_tensor_is_read_by_name(tmp_path):
    values = torch.tensor([3, 1, 2])
    checkpoint = checkpoint_in(tmp_path, d2t=values, other=torch.zeros(2))
    assert torch.equal(checkpoint.tensor("d2t"), values)
    error = refused(lambda: checkpoint.tensor("t2d"))
    assert error.code == "SD-E172"
    assert error.facts["has"] == "d2t, other"


@pytest.mark.parametrize("cut", [4, 20, 200])
def test_truncated_weights_are_named(cut, tmp_path):
    checkpoint = checkpoint_in(tmp_path, a=torch.zeros(64))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    error = refused(lambda: checkpoint.shapes)
    assert error.code == "SD-E146"
    assert str(file) in str(error)


def test_no_weights_at_all_are_named(tmp_path):
    error = refused(lambda: checkpoint_in(tmp_path).shapes)
    assert error.code == "SD-E146"
    assert str(tmp_path) in str(error)


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[1]", "not a JSON object")])
def test_a_broken_configuration_is_named(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    error = refused(lambda: Checkpoint.open(tmp_path))
    assert error.code == "SD-E106"
    assert words in str(error)
    assert str(tmp_path / "config.json") in str(error)


def test_a_place_that_is_no_checkpoint_is_named(tmp_path):
    error = refused(lambda: Checkpoint.open(tmp_path / "no" / "such" / "place"))
    assert error.code == "SD-E105"
    assert "has no config.json" in str(error)


def test_reading_a_checkpoint_loads_no_torch(tmp_path):
    checkpoint_in(tmp_path, a=torch.zeros(2))
    code = (
        "import sys; from specdec.sdk.checkpoint import Checkpoint; "
        "assert Checkpoint.open(sys.argv[1]).shapes == {'a': (2,)}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_an_adapter_is_read_by_its_own_configuration(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.get("r", int), checkpoint.config_file.name) == (8, "adapter_config.json")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Checkpoint.open(tmp_path).config == {"model_type": "llama"}


@pytest.mark.parametrize("key", ["", "model", "transformer_layer_config"])
@pytest.mark.parametrize(
    ("stated", "factor"), [({"logit_scale": 0.25}, 0.25), ({"logits_scaling": 8}, 0.125), ({}, None)]
)
def test_a_logit_scale_is_read_wherever_a_format_keeps_it(key, stated, factor, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({key: stated} if key else stated))
    assert Checkpoint.open(tmp_path).logit_scale == factor
