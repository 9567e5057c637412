"""Weights are read onto the device that serves: the host holds few of them at a time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.model import loading

LOADS = """
import json, sys
from pathlib import Path
import torch
from specdec.core.model.target import TargetModel, load_config
from specdec.sdk.packaged import packaged

def load(path, device, dtype):
    return TargetModel.load(path, load_config(path), getattr(torch, dtype), torch.device(device), None)

def memory(what):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return 1024 * int(line.split()[1])

path, device, dtype = sys.argv[1:]
load(str(packaged("tiny")), device, dtype)  # what is imported and allocated once
before = {name: memory(name) for name in ("VmHWM", "RssAnon")}
parameters = list(load(path, device, dtype).model.parameters())
print(json.dumps({
    "devices": sorted({each.device.type for each in parameters}),
    "weights": sum(each.nbytes for each in parameters),
    "peak": memory("VmHWM") - before["VmHWM"],
    "held": memory("RssAnon") - before["RssAnon"],  # the file's own pages are not in it
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """64 million parameters in float32."""
    path = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def loaded(folder, device, dtype):
    command = [sys.executable, "-c", LOADS, str(folder), device, dtype]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["devices"] == [device]
    assert found["weights"] > 100 * 2**20
    return found


@pytest.mark.slow
def test_weights_as_they_are_stored_are_the_pages_of_their_file(folder):
    found = loaded(folder, "cpu", "float32")
    assert found["held"] < found["weights"] / 4


@pytest.mark.slow
@pytest.mark.parametrize(("device", "is_in_host_memory"), [("meta", False), ("cpu", True)])
def test_converted_weights_are_in_host_memory_only_where_the_host_serves(folder, device, is_in_host_memory):
    """The device that keeps nothing stands for one with memory of its own."""
    found = loaded(folder, device, "bfloat16")
    assert (found["peak"] > found["weights"] / 2) == is_in_host_memory, found


def test_without_accelerate_they_go_through_host_memory(monkeypatch):
    monkeypatch.setattr(loading, "is_accelerate_available", lambda: False)
    assert loading.straight_to(torch.device("cuda", 1)) == {}
