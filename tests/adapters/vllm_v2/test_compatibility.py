"""The check at load reads vLLM's source, here of a vLLM that is written for it."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from scripts.vllm_fits import main

from specdec.adapters.vllm_v2.compatibility import MEMBERS, PARAMETERS, differences


@pytest.fixture
def package(tmp_path):
    """The package `vllm` with all that is relied on, and nothing else."""
    bodies = defaultdict(list)  # by file and class
    for place, names in PARAMETERS.items():
        file, _, path = place.partition(":")
        owner, _, name = path.rpartition(".")
        bodies[file, owner].append(f"def {name}({', '.join(names)}, *args, another=None, **kwargs): ...")
    for place, names in MEMBERS.items():
        bodies[tuple(place.split(":"))] += [f"{name}: int" for name in names]
    for (file, owner), lines in bodies.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / file).open("a") as source:
            head, indent = (f"class {owner}:\n", "    ") if owner else ("", "")
            source.write(head + "".join(f"{indent}{line}\n" for line in lines))
    return tmp_path


def edit(package, file, old, new):
    source = (package / file).read_text()
    assert old in source
    ast.parse(source.replace(old, new))
    (package / file).write_text(source.replace(old, new))


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


@pytest.mark.full
def test_the_vllm_that_was_tried_fits():
    from specdec.adapters.vllm_v2.compatibility import v2_differences

    assert v2_differences() == ()
