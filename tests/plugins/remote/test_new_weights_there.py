"""New weights for a drafter in another process: they reach one of the engine's own, and its later processes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from drafter_servers import Client, hosted_with, serving
from inside import proposer_of
from safetensors.torch import load_file
from test_isolation import NGRAM, engine, figures, is_alive, lengths, processes_of, until
from test_remote import remote

from specdec import LLM
from specdec.sdk import ConfigError, ProposerError
from specdec.sdk.packaged import packaged
from specdec.sdk.wire import Call, Failed

DRAFT_MODEL = {"model": "tiny/draft", "num_speculative_tokens": 4}
WRONG = "model.layers.0.mlp.down_proj.weight"


def without_mlp() -> list[dict[str, torch.Tensor]]:
    """Weights that make the drafter worse, in two parts."""
    tensors = load_file(packaged("tiny/draft") / "model.safetensors")
    names = [name for name in sorted(tensors) if name.endswith("down_proj.weight")]
    return [{name: tensors[name] * 0} for name in names[:2]]


def folder_of(llm: LLM) -> Path:
    return proposer_of(llm)._folder


@pytest.mark.full
def test_they_reach_a_process_and_the_one_that_follows_it() -> None:
    apart, inside = (engine(DRAFT_MODEL | more) for more in ({"isolation": {"kind": "process", "ahead": 0}}, {}))
    before = lengths(inside)
    assert lengths(apart) == before
    for tensors in (*without_mlp(), without_mlp()[0]):
        apart.update_proposer_weights(tensors), inside.update_proposer_weights(tensors)
    after = lengths(inside)
    assert after != before
    assert lengths(apart) == after
    assert len(list(folder_of(apart).iterdir())) == 2, "what was updated again is kept once"
    _, [child], _ = processes_of(apart)
    os.kill(child, signal.SIGKILL)
    until(lambda: not is_alive(child))
    until(lambda: lengths(apart) and figures(apart)["returns"] == 1)
    assert lengths(apart) == after
    shutil.rmtree(folder_of(apart))
    apart.update_proposer_weights(without_mlp()[0])
    _, [child], _ = processes_of(apart)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ProposerError, match="SD-E336 new weights cannot be read"):
        until(lambda: lengths(apart) and False)
    apart.update_proposer_weights(without_mlp()[1])
    assert lengths(apart) == after
    folder = folder_of(apart)
    apart.close()
    assert not folder.exists()


def test_a_file_of_weights_that_is_gone_or_broken_ends_no_process(tmp_path) -> None:
    address, broken = f"ipc://{tmp_path}/socket", tmp_path / "broken"
    broken.write_bytes(b"no safetensors")
    with serving(hosted_with(NGRAM), address, keeps_state=True), Client(address) as client:
        client.hello()
        for number, path in enumerate((tmp_path / "gone", broken)):
            client.say(Call(number, "update_weights", str(path)))
            answer = client.hear()
            assert isinstance(answer, Failed)
            assert (answer.number, answer.code) == (number, "SD-E336")
            assert str(path) in answer.facts["because"]


@pytest.mark.full
def test_those_that_do_not_fit_are_refused_as_in_one_process_and_change_nothing() -> None:
    errors, apart = [], engine(DRAFT_MODEL | {"isolation": {"kind": "process", "ahead": 0}})
    for llm in (apart, engine(DRAFT_MODEL)):
        with pytest.raises(ConfigError, match=r"SD-E228[\s\S]*expected \[128, 320\], found \[1\]") as raised:
            llm.update_proposer_weights({WRONG: torch.zeros(1)})
        errors.append((raised.value.code, raised.value.summary, raised.value.facts))
    assert errors[0] == errors[1]
    assert not list(folder_of(apart).iterdir())
    assert lengths(apart) == lengths(engine(DRAFT_MODEL))
    assert figures(apart)["outages"] == figures(apart)["errors"] == 0
    apart.close()


def test_a_server_keeps_its_own_and_the_error_says_where_to_change_them(tmp_path) -> None:
    address = f"ipc://{tmp_path}/socket"
    with serving(hosted_with(NGRAM), address):
        llm = engine(remote(address))
        with pytest.raises(ConfigError, match=rf"SD-E227[\s\S]*{address}[\s\S]*start its server again"):
            llm.update_proposer_weights({WRONG: torch.zeros(1)})
        llm.close()
