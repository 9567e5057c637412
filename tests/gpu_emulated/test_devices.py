"""Engines on other devices than the first, two of them in one process, captures that fail, memory that is little."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from drafter_servers import hosted_with
from emulated_cuda import emulated_cuda, plain_kernels
from inside import host_of, info_of, pool_of
from serving import TINY, engine, prompt

from specdec import LLM, SamplingParams
from specdec.core.kernels.backend import Unavailable, backend_of
from specdec.core.kernels.cuda.capture import CudaCapturer
from specdec.core.kernels.cuda.graphs import GraphedFunction
from specdec.core.kernels.cuda.triton_backend import TritonBackend
from specdec.sdk import ConfigError
from specdec.sdk.extensions import DraftKV
from specdec.sdk.wire import Row, Start

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SAMPLED = GREEDY.replace(temperature=0.8, seed=1)
MIB = 1 << 20


def generate(llm, params=GREEDY):
    outputs = llm.generate([{"prompt_token_ids": prompt(llm, index)} for index in range(3)], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.full
def test_engines_on_two_devices_step_in_turn(cuda):
    first, second = (engine("eagle", "sparse", None, device=f"cuda:{index}") for index in (0, 1))
    expected = [generate(llm, SAMPLED) for llm in (first, second)]
    assert expected[0] == expected[1]
    for llm in (first, second):
        for index in range(3):
            llm.engine.add_request(prompt(llm, index), SAMPLED, str(index))
    tokens = {(place, name): [] for place in (0, 1) for name in "012"}
    while first.engine.has_unfinished_requests or second.engine.has_unfinished_requests:
        for place, llm in enumerate((first, second)):
            for each in llm.engine.step():
                tokens[place, each.request.request_id] += each.token_ids
    for place, rows in enumerate(expected):
        assert [tokens[place, name] for name in "012"] == rows
    for llm in (first, second):
        llm.close()
    assert torch.cuda.current_device() == 0, "the caller's device stays the current one"


@pytest.mark.full
def test_a_device_without_a_number_is_the_current_one(cuda):
    with torch.cuda.device(1):
        llm = engine("ngram", "greedy", None)
    assert generate(llm)
    assert info_of(llm).device == "cuda:1"


@pytest.mark.full
def test_where_kernels_do_not_run_pytorch_writes_the_same_text(cuda, monkeypatch, caplog):
    expected = [generate(engine(method, "greedy", None), SAMPLED) for method in ("plain", "eagle")]

    def no_compiler(cls):
        raise Unavailable("Failed to find C compiler")

    monkeypatch.setattr(TritonBackend, "require", classmethod(no_compiler))
    backend_of.cache_clear()
    try:
        assert [generate(engine(method, "greedy", None), SAMPLED) for method in ("plain", "eagle")] == expected
    finally:
        backend_of.cache_clear()
    assert "Failed to find C compiler" in caplog.text


@pytest.mark.full
def test_a_drafter_that_is_served_captures_its_passes(cuda):
    config = {"model": "tiny/draft", "num_speculative_tokens": 3}
    drafted = {}
    for device in ("cpu", "cuda:0"):
        hosted = hosted_with(config, device=device)
        hosted.start("1/a", Start("a", prompt_ids := list(range(40, 60))))
        drafts = []
        for length, token in enumerate((7, 8, 9), start=len(prompt_ids)):
            with cuda.counting() as counts:
                (answer,) = hosted.step([("1/a", Row("a", length, [token], 3))])
            drafts.append(answer.tokens)
        drafted[device] = drafts
        assert (counts.figures()["replays"] > 0) == (device != "cpu")
        hosted.close()
    assert drafted["cpu"] == drafted["cuda:0"]


def test_a_device_that_is_not_there_is_refused(cuda):
    with pytest.raises(ConfigError, match=r"'cuda:2'(.|\n)*cuda:0 to cuda:1"):
        engine("plain", "greedy", None, device="cuda:2")


def test_after_a_failed_capture_work_goes_on_upon_the_stream_from_before(cuda, caplog):
    x = torch.arange(4.0, device="cuda")
    function = GraphedFunction(lambda value: value * value.max().item(), CudaCapturer(x.device), [4])
    before = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING, "specdec"):
        assert function(x).tolist() == [0, 3, 6, 9]
    assert "cannot be captured" in caplog.text
    assert torch.cuda.current_stream() is before
    assert cuda.capture is None


@pytest.mark.full
def test_captures_are_of_their_thread(cuda, monkeypatch):
    modes = []
    begin = torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda graph, *pool, **options: (modes.append(options["capture_error_mode"]), begin(graph, *pool, **options)),
    )
    engine("plain", "greedy", None)
    assert set(modes) == {"thread_local"}


def test_a_result_outlives_the_replays_of_other_functions(cuda):
    """Three functions in the order in which drafting records them: the first keeps scratch where results would lie."""
    capturer, x = CudaCapturer(torch.device("cuda:0")), torch.ones(4, 1000, device="cuda")
    wide = GraphedFunction(lambda value: (value * 3 + 1).sum(-1), capturer, [4])
    states = GraphedFunction(lambda value: value * 7, capturer, [4])
    wide(x)
    kept = states(x)
    assert wide(x).tolist() == [4000.0] * 4
    assert kept.unique().tolist() == [7.0]


def test_what_only_views_its_arguments_is_not_recorded(cuda):
    x = torch.ones(4, 6, device="cuda")
    function = GraphedFunction(lambda value: value[:, :3], CudaCapturer(x.device), [4])
    with cuda.counting() as counts:
        assert function(x).shape == function(x).shape == (4, 3)
    assert counts.replays == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
    ],
    ids=["dynamic", "longrope"],
)
def test_steps_of_targets_with_scaled_positions_are_recorded(rope, cuda, tmp_path):
    shutil.copytree(TINY / "target", tmp_path / "target")
    place = tmp_path / "target" / "config.json"
    config = json.loads(place.read_text())
    if rope["rope_type"] == "longrope":
        width = config["head_dim"] // 2
        rope = rope | {"short_factor": [1.0] * width, "long_factor": [2.0] * width}
    place.write_text(json.dumps(config | {"rope_parameters": rope}))
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3, "cuda_graphs": True}
    llm = LLM(str(place.parent), **settings)
    assert generate(llm)
    llm.engine.add_request(prompt(llm, 0), GREEDY)
    llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert counts.waits.total() == 1
    assert counts.replays == 1


@pytest.mark.full
@pytest.mark.parametrize("case", [("draft_model", "dense"), ("eagle3", "greedy")], ids="-".join)
def test_the_cache_is_sized_from_what_a_drafter_leaves(case):
    with emulated_cuda(memory=192 * MIB) as cuda, plain_kernels(cuda):
        llm = engine(*case, None, max_num_seqs=32, max_model_len=512)
        assert generate(llm)
        heap, num_blocks = cuda.heaps[0], pool_of(llm).num_blocks
        assert 10 < num_blocks < 32 * 512 // 16, "all that memory allows, and less than could be used"
        spec = host_of(llm).needs.extension(DraftKV)
        gathered = 32 * 512 * 2 * spec.num_heads * spec.head_dim * 4
        most = (
            0.9 * heap.total + 1.5 * gathered
        )  # by the plain kernel of a drafter's layer; the device's gathers nothing
        assert 0.5 * heap.total < heap.peak <= most, "the share that is given, drafter and graphs included"


ASKING = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "logit_bias": {5: 1.0},
    "min_tokens": 50,
    "logprobs": 3,
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "num_uploads"), [("ngram", 2), ("eagle", 3)])
def test_penalties_and_logprobs_are_one_upload_more_and_no_wait(name, num_uploads, cuda):
    """Drafts of a device count for penalties there, and log-probabilities come with the outcome."""
    llm, params = engine(name, "greedy", None), GREEDY.replace(max_tokens=60, **ASKING)
    requests = [llm.engine.get_request(llm.engine.add_request(prompt(llm, index), params)) for index in range(3)]
    for _ in range(4):
        llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert counts.waits.total() == 1, counts.waits
    assert counts.uploads.total() == num_uploads, counts.uploads
    asked = [{"prompt_token_ids": prompt(llm, index)} for index in range(3)]
    plain = engine("plain", "greedy", None, device="cpu").generate(asked, params)
    for request, expected in zip(requests, plain, strict=True):
        found, length = request.output_token_ids, len(request.output_token_ids)
        assert found == list(expected.outputs[0].token_ids)[:length]
        for ours, theirs in zip(request.logprobs, expected.outputs[0].logprobs, strict=False):
            assert ours == pytest.approx(theirs, abs=1e-4)


def experts(**settings):
    return LLM(str(TINY / "moe"), device="cuda", dtype="float32", max_model_len=128, max_num_seqs=3, **settings)


def test_experts_that_wait_are_not_captured_and_one_warning_says_so(cuda, caplog):
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = experts(moe_backend="eager")
    found = [record.message for record in caplog.records if "captured" in record.message]
    assert len(found) == 1
    assert found[0].startswith("SD-W306")
    llm.engine.add_request(prompt(llm, 0), GREEDY)
    llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert counts.replays == 0
    with pytest.raises(ConfigError, match="SD-E234"):
        experts(moe_backend="eager", cuda_graphs=True)


@pytest.mark.full
def test_experts_in_one_product_are_recorded_and_a_step_waits_once(cuda):
    llm = experts(moe_backend="batched_mm", cuda_graphs=True)
    llm.engine.add_request(prompt(llm, 0), GREEDY)
    llm.engine.step()
    with cuda.counting() as counts:
        llm.engine.step()
    assert (counts.waits.total(), counts.replays) == (1, 1)


@pytest.mark.full
def test_eager_is_no_word_for_a_target_without_experts(cuda):
    assert generate(engine("plain", "greedy", None, moe_backend="eager", cuda_graphs=True))
