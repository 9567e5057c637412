"""The check at load reads vLLM's source, here of a vLLM that is written for it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from engine_source import edit, write_engine
from scripts.vllm_fits import main

from specdec.adapters.vllm_v2.compatibility import MEMBERS, PARAMETERS, differences
from specdec.adapters.vllm_v2.plugin import register


@pytest.fixture
def package(tmp_path):
    return write_engine(tmp_path, PARAMETERS, MEMBERS)


RUNNER = "v1/worker/gpu/model_runner.py"
STATES = "v1/worker/gpu/states.py"


def test_a_new_parameter_with_a_default_and_new_fields_do_not_matter(package):
    edit(package, STATES, "    device: int", "    device: int\n    more: int")
    assert differences(package) == []
    assert main(package) == 0


def test_a_parameter_that_has_to_be_given_is_named_with_both_signatures(package, capsys):
    edit(package, RUNNER, "add_requests(self, scheduler_output", "add_requests(self, output, dp_state")
    expected = "add_requests(self, output, dp_state), expected (self, scheduler_output)"
    assert differences(package) == [f"{RUNNER}:GPUModelRunner.{expected}"]
    assert main(package) == 1
    assert expected in capsys.readouterr().out


def test_what_is_gone_is_named(package):
    edit(package, RUNNER, "def take_draft_token_ids", "def take_drafts")
    edit(package, STATES, "    total_len: int\n", "")
    (package / "v1/worker/gpu/input_batch.py").unlink()
    gone, no_field, no_file = differences(package)
    assert gone == f"{RUNNER}:GPUModelRunner.take_draft_token_ids is gone"
    assert no_field == f"{STATES}:RequestState has no total_len"
    assert no_file.startswith("v1/worker/gpu/input_batch.py:InputBatch has no req_ids")


def test_another_folder_is_no_vllm(tmp_path, capsys):
    assert main(tmp_path / "other") == 2
    assert "no folder of the package vllm" in capsys.readouterr().out


def test_a_vllm_without_this_runner_stays_as_it_is(monkeypatch):
    """vLLM calls the entry point wherever this package is installed beside it, and an error there would end it."""
    config, gpu = ModuleType("vllm.config"), ModuleType("vllm.v1.worker.gpu")
    config.SpeculativeConfig = type("SpeculativeConfig", (), {})
    config.VllmConfig = type("VllmConfig", (), {"__post_init__": print})
    gpu.spec_decode = ModuleType("spec_decode")
    for name, module in {"vllm": ModuleType("vllm"), "vllm.config": config, "vllm.v1.worker.gpu": gpu}.items():
        monkeypatch.setitem(sys.modules, name, module)
    register.__wrapped__()
    assert config.VllmConfig.__post_init__ is print
    monkeypatch.setitem(sys.modules, "vllm.config", None)
    register.__wrapped__()


@pytest.mark.full
def test_the_vllm_that_was_tried_fits():
    from specdec.adapters.vllm_v2.compatibility import v2_differences

    assert v2_differences() == ()
