"""Recorded steps: which shape serves a batch, what padding does, and that nothing generated changes.

A capturer stands in for the device. It runs the work when it is told to capture it and again at every replay, from the
inputs that lie in the fixed places, so that the real passes of the model are what is compared.
"""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch
from device_steps import DRAFTERS, Replayer, address_by_table, capture_with
from engine_helpers import GREEDY, assert_same_tokens, make_llm, tokens
from inside import addressing_of, pool_of, served_target_of
from sweeps import slow_unless

from specdec import SamplingParams
from specdec.core.kernels.cpu.backend import CpuBackend
from specdec.core.kernels.cuda.buckets import MOST_TOKENS, Bucket, batch_sizes, buckets
from specdec.core.kernels.cuda.graphs import GraphedFunction, GraphedTarget
from specdec.sdk import ConfigError


class Refuser:
    def __init__(self, device=None):
        pass

    def capture(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture
def by_table(monkeypatch):
    address_by_table(monkeypatch)


@pytest.fixture
def capturer(by_table, monkeypatch):
    made = Replayer()
    capture_with(monkeypatch, lambda device: made)
    return made


MOST = {"max_num_seqs": 4, "max_num_batched_tokens": 48}


def generate(llm, prompts):
    return tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY))


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 16, 64, 100, 512])
def test_at_most_a_quarter_of_what_is_computed_is_padding(most):
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count <= size / 4


def test_shapes_are_captured_from_the_largest_down_and_none_is_too_large():
    shapes = buckets(64, 5)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert shapes[0] == Bucket(64, 512, 512, 384)
    assert Bucket(64, 384, 6, 384) in shapes
    assert Bucket(1, 1, 1, 1) in shapes
    assert max(shape.num_tokens for shape in buckets(4096, 5)) <= MOST_TOKENS
    assert max(shape.num_tokens for shape in buckets(8, 0, 40)) == 40
    assert shapes[0].num_rows == max(shape.num_rows for shape in shapes)


@pytest.mark.parametrize("seed", range(20))
def test_any_mix_of_drafts_and_prompts_is_captured_with_a_quarter_of_padding_at_most(seed):
    """1 to 64 decoding rows, drafts in some of them, beside pieces of prompts."""
    rng, shapes = random.Random(seed), buckets(64, 5)
    for _ in range(50):
        drafted = [1 + rng.choice([0, 0, rng.randint(1, 5)]) for _ in range(rng.randint(1, 63))]
        queries = drafted + ([rng.randint(1, 512 - sum(drafted))] if rng.random() < 0.5 else [])
        fitting = [shape for shape in shapes if shape.holds(len(queries), sum(queries), max(queries), None)]
        smallest = min(shape.num_tokens for shape in fitting)
        assert smallest - sum(queries) <= smallest / 4


@pytest.mark.parametrize("count", [1, 3, 6])
def test_replayed_steps_generate_what_transformers_generates(
    count, capturer, prompts, truth, sequences, reference_model
):
    llm = make_llm("Scripted", options={"sequences": sequences, "wrong_every": 3, "ragged": True}, **MOST)
    assert isinstance(served_target_of(llm), GraphedTarget)
    assert capturer.num_captured == len(buckets(4, 4, 48))
    assert_same_tokens(generate(llm, prompts[:count]), truth[:count], prompts[:count], reference_model)
    assert capturer.num_replays > 10


PASSES = {"eagle": 2, "eagle3": 2, "draft": 2, "dflash": 2, "medusa": 1}
"""Recorded pieces of a greedy decoding step: what is made of the committed rows, and the draft of all K tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_unless("eagle3", PASSES))
def test_passes_of_a_drafter_are_replayed_and_draft_the_same(name, capturer, prompts, truth, target_path, monkeypatch):
    """Three requests in a shape for four: the row that is computed twice changes nothing."""
    settings = {"k": 3, "speculative": {"model": str(target_path.parent / name)}, **MOST}
    method = f"device_steps:{DRAFTERS[name].__name__}"
    llm = make_llm(method, **settings)
    assert generate(llm, prompts[:3]) == truth[:3]
    plain = make_llm(method, **settings, cuda_graphs=False)
    assert generate(plain, prompts[:3]) == truth[:3]
    assert llm.engine.metrics.acceptance.num_accepted_tokens == plain.engine.metrics.acceptance.num_accepted_tokens > 0


@pytest.mark.parametrize("name", slow_unless("dflash", PASSES))
def test_no_pass_of_a_decoding_step_runs_outside_what_is_captured(name, capturer, prompts, target_path, monkeypatch):
    outside = []
    attend = CpuBackend.attend_pages

    def seen(*args):
        outside.append(not capturer.is_running)
        return attend(*args)

    monkeypatch.setattr(CpuBackend, "attend_pages", staticmethod(seen))
    speculative = {"model": str(target_path.parent / name)}
    llm = make_llm(f"device_steps:{DRAFTERS[name].__name__}", k=3, speculative=speculative, **MOST)
    for index in range(3):
        llm.engine.add_request(prompts[index][:12], GREEDY.replace(max_tokens=60), str(index))
    for _ in range(6):
        llm.engine.step()
    outside.clear()
    captured, before = capturer.num_captured, capturer.num_replays
    for _ in range(5):
        llm.engine.step()
    assert outside
    assert not any(outside)
    assert capturer.num_captured == captured
    assert capturer.num_replays - before == 5 * (1 + PASSES[name])


@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("name", slow_unless("eagle3", PASSES))
def test_drafts_with_distributions_are_drawn_inside_what_is_captured(name, form, capturer, prompts, target_path):
    """As many replays as for greedy drafts, whatever is drawn."""
    speculative = {"model": str(target_path.parent / name), "draft_sample_method": "probabilistic"}
    speculative["proposer_config"] = {"draft_distribution": form}
    llm = make_llm(f"device_steps:{DRAFTERS[name].__name__}", k=3, speculative=speculative, **MOST)
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=5)
    for index in range(3):
        llm.engine.add_request(prompts[index][:12], params, str(index))
    for _ in range(6):
        llm.engine.step()
    captured, before = capturer.num_captured, capturer.num_replays
    for _ in range(5):
        llm.engine.step()
    assert capturer.num_captured == captured
    assert capturer.num_replays - before == 5 * (1 + PASSES[name])


def test_a_chain_with_distributions_draws_the_same_where_it_is_captured(capturer, prompts, target_path):
    params = SamplingParams(temperature=0.8, max_tokens=32, ignore_eos=True, seed=5)
    found = {}
    for graphs in (None, False):
        speculative = {"model": str(target_path.parent / "eagle3"), "draft_sample_method": "probabilistic"}
        llm = make_llm("device_steps:DeviceEagle3", k=3, speculative=speculative, **MOST, cuda_graphs=graphs)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts[:3]], params)
        found[graphs] = tokens(outputs), llm.engine.metrics.acceptance.num_accepted_tokens
    assert found[None] == found[False]
    assert found[None][1] > 0


def bucket_for(graphed, *num_queries):
    view = SimpleNamespace(rows=torch.zeros(len(num_queries)), max_queries=max(num_queries))
    return graphed.bucket_of(view, sum(num_queries))


def test_the_smallest_captured_shape_with_room_serves_a_batch(capturer):
    graphed = served_target_of(make_llm("Noise", k=4, max_num_seqs=8, max_num_batched_tokens=64))
    assert bucket_for(graphed, 1) == Bucket(1, 1, 1, 1)
    assert bucket_for(graphed, 1, 1, 1) == Bucket(4, 4, 1, 4)
    assert bucket_for(graphed, 1, 3) == Bucket(4, 4, 4, 4)
    assert bucket_for(graphed, *[1] * 7, 5) == Bucket(8, 12, 5, 12)
    assert bucket_for(graphed, *[1] * 7, 20) == Bucket(8, 28, 28, 28)
    assert bucket_for(graphed, 65) is None


def test_a_prompt_beside_decoding_runs_no_pass_outside_what_is_captured(capturer, prompts):
    llm = make_llm(**MOST)
    llm.engine.add_request(prompts[0][:20], GREEDY, "first")
    llm.engine.step()
    replays = []
    for index in range(1, 4):
        llm.engine.add_request(prompts[index][:20], GREEDY, str(index))
        before = capturer.num_captured, capturer.num_replays
        llm.engine.step()
        replays.append((capturer.num_captured - before[0], capturer.num_replays - before[1]))
    assert replays == [(0, 1)] * 3


def test_padding_belongs_to_nobody_whatever_was_there_before(capturer, prompts):
    """After a larger batch in the same places: rows without tokens in the pad row, tokens that no request owns."""
    llm = make_llm(**MOST)
    for index in range(4):
        llm.engine.add_request(prompts[index][:9], GREEDY.replace(max_tokens=3 if index == 3 else 9), str(index))
    for _ in range(5):
        llm.engine.step()
    inputs, table = served_target_of(llm)._inputs, addressing_of(llm).table
    assert inputs.rows.tolist()[3:] == [table.pad_row]
    assert inputs.cu_queries.tolist() == [0, 1, 2, 3, 3]
    assert table.blocks[table.pad_row].eq(pool_of(llm).num_blocks).all()


def test_a_function_is_captured_for_all_sizes_at_once_and_padded_with_its_first_row():
    seen = []

    def double(left, right):
        seen.append(left.tolist())
        return left * 2 + right[:, 0]

    capturer = Replayer()
    function = GraphedFunction(double, capturer, [1, 2, 4])
    for count in (3, 4, 3):
        left = torch.arange(count) + count
        assert function(left, torch.ones(count, 2)).tolist() == (left * 2 + 1).tolist()
    assert capturer.num_captured == 3, "all of them by the first call"
    assert seen[-1] == [3, 4, 5, 3]
    assert function(torch.arange(5), torch.ones(5, 2)).tolist() == [1, 3, 5, 7, 9]
    assert capturer.num_captured == 3, "five rows fit no size"


def test_a_target_that_cannot_be_captured_runs_without_or_is_refused(by_table, monkeypatch, caplog, prompts, truth):
    capture_with(monkeypatch, Refuser)
    with caplog.at_level(logging.WARNING, "specdec"):
        llm = make_llm(max_num_seqs=2)
    assert "cannot be captured" in caplog.text
    assert generate(llm, prompts[:1]) == truth[:1]
    with pytest.raises(ConfigError, match="cannot be captured"):
        make_llm(max_num_seqs=2, cuda_graphs=True)


def test_a_function_that_cannot_be_captured_runs_as_it_is_and_says_so(caplog):
    function = GraphedFunction(torch.neg, Refuser(), [1, 2])
    with caplog.at_level(logging.WARNING, "specdec"):
        assert [function(torch.ones(2)).tolist() for _ in range(2)] == [[-1, -1]] * 2
    assert caplog.text.count("cannot be captured") == 1


def test_graphs_on_a_cpu_are_refused_only_where_they_were_asked_for():
    with pytest.raises(ConfigError, match="cuda_graphs"):
        make_llm(cuda_graphs=True)
    assert not isinstance(served_target_of(make_llm()), GraphedTarget)
