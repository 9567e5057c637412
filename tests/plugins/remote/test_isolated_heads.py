"""Heads that read hidden states, in a process of their own: the states go there in memory that both sides have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from drafter_servers import hosted_with
from inside import target_of
from test_isolation import PROMPTS, SAMPLED, engine, figures, mine, processes_of, sampled, texts, until

from specdec import SamplingParams
from specdec.adapters.serving.hosted import CHUNK, Hosted, served_speculation
from specdec.adapters.serving.keeper import _tokenizer
from specdec.adapters.serving.no_target import NoTarget
from specdec.core.config.engine_config import EngineConfig
from specdec.core.engine.plan import Plan
from specdec.core.model.tokenizer import load_tokenizer
from specdec.core.registry import PluginSettings
from specdec.plugins.remote.isolation import place_of
from specdec.plugins.remote.texts import Text
from specdec.sdk import Refusal
from specdec.sdk.child_wire import Order
from specdec.sdk.errors import RequestError
from specdec.sdk.packaged import packaged
from specdec.sdk.shared_states import SharedStates
from specdec.sdk.wire import Row, Start

EAGLE3 = {"method": "eagle3", "model": "tiny/eagle3", "num_speculative_tokens": 4}
HEADS = {
    "eagle3": EAGLE3,
    "eagle": {"method": "eagle", "model": "tiny/eagle", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa", "model": "tiny/medusa", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "model": "tiny/dflash", "num_speculative_tokens": 4},
    "dspark": {"method": "dspark", "model": "tiny/dspark", "num_speculative_tokens": 4},
}
PROCESS = {"isolation": "process"}
GREEDY = SamplingParams(temperature=0, max_tokens=48)


def info(**facts):
    settings = PluginSettings.from_environment({})
    return replace(Plan.make(EngineConfig(model="tiny", device="cpu", max_num_seqs=4), None, settings).info, **facts)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return texts(engine())


@pytest.mark.slow
@pytest.mark.parametrize("config", HEADS.values(), ids=HEADS)
def test_drafts_are_those_of_one_process(config) -> None:
    found = []
    for isolation in ({}, PROCESS):
        llm = engine(config | isolation)
        found.append(sampled(llm, params=GREEDY))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.full
def test_drawn_drafts_are_those_of_one_process() -> None:
    found = []
    for isolation in ({}, PROCESS):
        llm = engine(EAGLE3 | {"draft_sample_method": "probabilistic"} | isolation)
        found.append(sampled(llm, params=SAMPLED))
        llm.close()
    assert found[0] == found[1]


@pytest.mark.full
def test_long_prompts_in_chunks_shared_prefixes_and_preemption() -> None:
    """The states of a prompt come with its first question, and after a preemption all of them come again."""
    long, short = [*range(100, 100 + CHUNK + 90)], [*range(200, 350)]
    calls = [long], [short, short, [*short[:100], *long[:50]], long[:150]]
    settings = {"max_num_batched_tokens": 128, "num_kv_blocks": 45, "max_num_seqs": 4, "max_model_len": 720}
    found, preempted = [], []
    for config in (None, EAGLE3 | PROCESS):
        llm = engine(config, **settings)
        prompts = [[{"prompt_token_ids": ids} for ids in each] for each in calls]
        found.append([texts(llm, each, GREEDY.replace(max_tokens=80)) for each in prompts])
        preempted.append(llm.engine.metrics.counts["num_preemptions"])
        accepted = llm.engine.metrics.acceptance.num_accepted_tokens
        llm.close()
    assert found[0] == found[1]
    assert preempted[1] > 0
    assert accepted > 0


@pytest.mark.full
def test_requests_that_run_when_it_is_killed_go_on_plainly_and_new_ones_get_drafts(plain) -> None:
    llm = engine(EAGLE3 | PROCESS)
    for number, prompt in enumerate(range(3)):
        llm.engine.add_request([11 + prompt, 12, 13, 14], GREEDY, str(number))
    drafted = []
    for step in range(30):
        llm.engine.step()
        if step == 3:
            os.kill(processes_of(llm)[1][0], signal.SIGKILL)
        drafted.append(llm.engine.metrics.acceptance.num_drafts)
    assert drafted[3] > 0
    assert drafted[5] == drafted[-1], "their states are gone with the process"
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
    until(lambda: llm.engine.step() == [] and figures(llm)["up"])
    assert texts(llm) == plain
    assert llm.engine.metrics.acceptance.num_drafts > drafted[-1]
    assert figures(llm)["restarts"] == figures(llm)["returns"] == 1
    llm.close()


@pytest.mark.full
def test_an_error_costs_one_step_its_drafts_as_in_one_process(plain) -> None:
    found = []
    for isolation in (None, "process"):
        llm = engine(mine("EndsWithStates", isolation, how="raises") | {"on_proposer_error": "skip_step"})
        found.append(sampled(llm, params=GREEDY))
        llm.close()
    assert found[0] == found[1]
    assert min(each["num_draft_tokens"] for _, each in found[1]) > 8 * 4


@pytest.mark.full
def test_answers_that_come_late_leave_the_text(plain) -> None:
    llm = engine(EAGLE3 | {"isolation": {"kind": "process", "deadline_ms": 0.5}})
    assert [texts(llm) for _ in range(2)] == [plain] * 2
    assert figures(llm)["late"] > 0
    llm.close()


@pytest.mark.full
def test_a_request_that_is_preempted_and_aborted_gives_up_its_slot_there() -> None:
    """It begins anew while a question is in flight, and ends before the drafter could be told of it again."""
    config = mine("SlowWithStates", {"kind": "process", "deadline_ms": 1})
    llm = engine(config, max_num_seqs=2, num_kv_blocks=8, max_num_batched_tokens=64)
    longer, counts = GREEDY.replace(max_tokens=90, ignore_eos=True), llm.engine.metrics.counts
    for number in range(1, 3):
        _, second = (llm.engine.add_request([11, 12, 13, start], longer) for start in (1, 2))
        while counts["num_preemptions"] < number or not llm.engine.get_request(second).num_computed_tokens:
            llm.engine.step()
        llm.engine.abort(second)
        while llm.engine.has_unfinished_requests:
            llm.engine.step()
    time.sleep(2)
    texts(llm, PROMPTS[:2], longer)
    assert figures(llm)["no_slot"] == 0
    llm.close()


# The memory, and who counts what is in it


def test_what_was_written_is_read_where_the_descriptor_is_known() -> None:
    ours = SharedStates(info(hidden_size=4, dtype="bfloat16"), 2)
    theirs = SharedStates(info(hidden_size=4, dtype="bfloat16"), 2, os.dup(ours.descriptor))
    for count in (3, 2, 5000, 1):
        rows = torch.randn(count, 8).bfloat16()
        ours.write([rows[:1], rows[1:]])
        assert torch.equal(theirs.read(count), rows)
    with pytest.raises(ValueError, match="were announced"):
        theirs.read(5001)


def test_states_with_a_gap_are_not_handed_over() -> None:
    text = Text(sent=3)
    text.see(0, torch.zeros(2, 4))
    text.see(5, torch.ones(1, 4))
    assert (text.num_states, [len(each) for each in text.hand_over()]) == (2, [2])
    text.sent = 0
    assert text.is_lost
    text.see(2, torch.ones(1, 4))
    assert text.states == []
    assert not text.see(0, torch.ones(4, 4))
    assert (text.is_lost, text.num_states) == (False, 4)
    text.sent = 5
    assert text.see(0, torch.ones(2, 4)), "the drafter holds the text that was left"


def test_a_drafter_refuses_states_of_other_tokens() -> None:
    target = info()
    memory = SharedStates(target, 3)
    settings = PluginSettings.from_environment({})
    plan = Plan.make(EngineConfig(model="tiny", device="cpu", max_num_seqs=4), None, settings)
    speculation = served_speculation(EAGLE3, plan.info, settings, plan.hooks, 0)
    hosted = Hosted(plan.info, speculation, plan.hooks.observers, None, 0, os.dup(memory.descriptor))
    hosted.start("1/a", Start("a", [1, 2, 3]))
    memory.write([torch.zeros(3, 3 * target.hidden_size, dtype=getattr(torch, target.dtype))])
    with pytest.raises(RequestError, match="hidden states of other tokens"):
        hosted.step([("1/a", Row("a", 3, [4], 4))], num_states=[2])
    with pytest.raises(RequestError, match="no hidden states"):
        hosted.step([("1/a", Row("a", 3, [4], 4))], num_states=[4])
    with pytest.raises(RequestError, match="no hidden states"):
        hosted.step([("1/a", Row("a", 3, [4], 4))])
    (draft,) = hosted.step([("1/a", Row("a", 3, [4], 4))], num_states=[3])
    assert len(draft.tokens) == 4
    assert hosted._states._waiting == {}, "all of them were shown"
    hosted.close()


def test_a_server_has_no_memory_with_its_clients() -> None:
    with pytest.raises(Refusal, match=r'hidden_states(.|\n)*"isolation": "process"'):
        hosted_with(EAGLE3)


# The target's tables


def test_the_tables_are_the_targets() -> None:
    plain, target = engine(), NoTarget(info(dtype="float32"))
    model = target_of(plain).model
    ids, states = torch.arange(40), torch.randn(5, model.config.hidden_size)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    with torch.inference_mode():
        assert torch.equal(target.get_input_embeddings()(ids), embedding(ids))
        torch.testing.assert_close(target.get_output_embeddings()(states), head(states))


def test_without_a_checkpoint_there_are_no_tables() -> None:
    with pytest.raises(Refusal, match=r"uses the target's embedding or lm_head[\s\S]*'a model object'"):
        NoTarget(info(checkpoint_dir=None, model="a model object")).get_input_embeddings()(torch.zeros(1).long())


@pytest.fixture
def hub_id(tmp_path, monkeypatch) -> str:
    """The packaged target, as the cache of the hub keeps it."""
    repository = tmp_path / "models--org--target"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(packaged("tiny"))
    for module in ("huggingface_hub.constants", "transformers.utils.hub"):
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.setattr(f"{module}.{name}", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return "org/target"


def test_a_target_of_the_hub_has_its_tables_and_its_tokenizer_there_too(hub_id) -> None:
    ids, of_hub = torch.arange(40), {"model": hub_id, "checkpoint_dir": None}
    tables = [NoTarget(info(dtype="float32", **facts)).get_input_embeddings()(ids) for facts in (of_hub, {})]
    assert torch.equal(*tables)
    assert _tokenizer(order_with((hub_id, False))).get_vocab() == engine().engine.tokenizer.get_vocab()


def test_a_tokenizer_with_code_of_its_own_is_loaded_again_as_the_engine_did(tmp_path) -> None:
    for file in packaged("tiny").glob("*.json"):
        shutil.copy(file, tmp_path)
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass Mine(PreTrainedTokenizerFast): ...\n"
    (tmp_path / "mine.py").write_text(code)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(None, str(tmp_path), trust_remote_code=True)
    assert place_of(tokenizer) == (str(tmp_path), True)
    assert type(_tokenizer(order_with(place_of(tokenizer)))).__name__ == "Mine"
    assert place_of(engine().engine.tokenizer) == (str(packaged("tiny")), False)


def order_with(tokenizer) -> Order:
    return Order({}, {}, "", [], tokenizer, None, None, 0, 1.0)
