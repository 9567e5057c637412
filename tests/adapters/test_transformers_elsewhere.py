"""Drafters in another process, inside `model.generate`."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import transformers
from drafter_servers import hosted_with, serving

from specdec.adapters.transformers import speculative

ENGINE = f"transformers {transformers.__version__}, CPU"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT_MODEL = {"model": "tiny/draft", "num_speculative_tokens": 4}
HEAD = {"method": "eagle3", "model": "tiny/eagle3", "num_speculative_tokens": 4}


def remote(address):
    return {"method": "remote", "num_speculative_tokens": 4, "proposer_config": {"address": address}}


def greedy(model, ids, **settings):
    return model.generate(ids, max_new_tokens=48, do_sample=False, **settings)


@pytest.fixture(scope="module")
def truth(model, prompts):
    """What plain `generate` says to each prompt."""
    return [greedy(model, ids) for ids in prompts]


def acceptance(model, prompts, truth, config):
    """Of drafts for these prompts, whose texts are right."""
    decoding = speculative(model, config)
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    decoding.close()
    return decoding.metrics.acceptance


@pytest.mark.slow
@pytest.mark.parametrize("config", [NGRAM, DRAFT_MODEL], ids=["ngram", "draft_model"])
def test_a_server_drafts_as_one_process_does(model, prompts, truth, shown, config, tmp_path):
    address = f"ipc://{tmp_path}/socket"
    with serving(hosted_with(config), address):
        found = acceptance(model, prompts, truth, remote(address))
    assert found == acceptance(model, prompts, truth, config)
    assert found.num_accepted_tokens > 0
    shown(ENGINE, "a drafter that a server runs")


@pytest.mark.full
@pytest.mark.parametrize("config", [NGRAM, DRAFT_MODEL, HEAD], ids=["ngram", "draft_model", "head"])
def test_a_process_of_its_own_drafts_as_this_one_does(model, prompts, truth, shown, config):
    found = acceptance(model, prompts, truth, config | {"isolation": "process"})
    assert found == acceptance(model, prompts, truth, config)
    shown(ENGINE, "a drafter in a process of its own")


@pytest.mark.slow
def test_a_server_draws_as_one_process_does(model, prompts, tmp_path):
    drawn = DRAFT_MODEL | {"draft_sample_method": "probabilistic"}
    with serving(hosted_with(drawn), f"ipc://{tmp_path}/socket") as server:
        there = remote(server.address) | {"draft_sample_method": "probabilistic"}
        found = [sampled(model, prompts, config) for config in (there, drawn)]
    assert found[0] == found[1]
    assert found[0][1].num_accepted_tokens > 0


@pytest.mark.parametrize(("deadline_ms", "latency_ms", "kinds"), [(None, 0, {"in_time"}), (0, 4, {"late", "rebased"})])
def test_a_service_is_waited_for_or_answers_late(model, prompts, truth, tmp_path, deadline_ms, latency_ms, kinds):
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([text[0].tolist() for text in truth]))
    options = {"file": str(file), "latency_ms": latency_ms, "deadline_ms": deadline_ms}
    config = {"method": "adapter_proposers:KnowsTheText", "num_speculative_tokens": 4, "proposer_config": options}
    decoding = speculative(model, config)
    for ids, text in zip(prompts, truth, strict=True):
        assert torch.equal(greedy(model, ids, custom_generate=decoding), text)
    figures = {name: value for name, value in decoding.proposer_figures().items() if value}
    decoding.close()
    assert decoding.metrics.acceptance.num_accepted_tokens > 0
    assert all(any(name.endswith(f"_{kind}") for name in figures) for kind in kinds), figures


def sampled(model, prompts, config):
    """Texts, and what was accepted for them."""
    decoding, texts = speculative(model, config), []
    for seed, ids in enumerate(prompts):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, max_new_tokens=48, do_sample=True, custom_generate=decoding).tolist())
    decoding.close()
    return texts, decoding.metrics.acceptance


class Interrupted:
    """A streamer. The drafter is lost behind four parts of the text, and back behind twelve."""

    def __init__(self, decoding, lose, find) -> None:
        self._decoding, self._lose, self._find = decoding, lose, find
        self._num_parts = self.num_accepted = 0  # drafts, when it is back

    def put(self, value) -> None:
        self._num_parts += 1
        if self._num_parts == 4:
            self._lose()
        if self._num_parts == 12:
            self._find()
            drafter = self._decoding.proposer._conversation._drafter
            while not drafter.is_up:
                time.sleep(0.01)
            self.num_accepted = self._decoding.metrics.acceptance.num_accepted_tokens

    def end(self) -> None: ...


def interrupted(model, ids, config, lose, find):
    """The text, drafts that were accepted after the drafter came back, and what the proposer shows."""
    decoding = speculative(model, config)
    streamer = Interrupted(decoding, lambda: lose(decoding), find)
    text = greedy(model, ids, custom_generate=decoding, token_streamer=streamer)
    figures = {name.rpartition("_")[2]: value for name, value in decoding.proposer_figures().items()}
    decoding.close()
    return text, decoding.metrics.acceptance.num_accepted_tokens - streamer.num_accepted, figures


def test_a_server_that_goes_and_comes_back_costs_drafts(model, prompts, truth, tmp_path):
    address = f"ipc://{tmp_path}/socket"
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(serving(hosted_with(NGRAM), address))
        again = serving(hosted_with(NGRAM), address)
        asked = remote(address), lambda _: first.close(), lambda: second.enter_context(again)
        text, num_accepted, figures = interrupted(model, prompts[0], *asked)
    assert torch.equal(text, truth[0])
    assert num_accepted > 0
    assert figures["outages"] == figures["returns"] == 1


@pytest.mark.full
def test_a_process_that_is_killed_costs_drafts_until_it_is_back(model, prompts, truth):
    def kill(decoding):
        keeper = decoding.proposer._child._keeper._process.pid
        child = Path(f"/proc/{keeper}/task/{keeper}/children").read_text()
        os.kill(int(child), signal.SIGKILL)

    text, num_accepted, figures = interrupted(model, prompts[0], NGRAM | {"isolation": "process"}, kill, lambda: None)
    assert torch.equal(text, truth[0])
    assert num_accepted > 0
    assert figures["outages"] == figures["returns"] == figures["restarts"] == 1
