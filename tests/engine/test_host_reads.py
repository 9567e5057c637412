"""How often a step waits for its device, and how often it sends something there. `tests/gpu` counts real waits."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from device_steps import DRAFTERS, Replayer, Waits, WaitsBelow, address_by_table, capture_with
from engine_helpers import GREEDY, make_llm
from inside import host_of
from sweeps import covering

from specdec import SamplingParams
from specdec.core.cache.transfer import aligned
from specdec.core.kernels.cpu.backend import CpuBackend
from specdec.core.rejection.sampler import verify_plainly
from specdec.sdk.model_proposer import vocabulary

K = 3
NUM_CHECKED_STEPS = 18
NUM_STEPS = 5
SAMPLED = SamplingParams(temperature=0.8, max_tokens=48, ignore_eos=True, seed=1)
ONE_WAIT = [{"tolist": 1}] * NUM_STEPS


def verdict_on_device(*args, **named):
    """The CPU's verdict, without the copy that the host has of it."""
    return replace(verify_plainly(*args, **named), on_host=None)


@pytest.fixture
def waits(monkeypatch):
    mode = Waits()
    address_by_table(monkeypatch)
    forms = {"attend_pages": CpuBackend.attend_pages, "verify": verdict_on_device}
    for name, form in (forms | {"draft_uniforms": CpuBackend.draft_uniforms}).items():
        monkeypatch.setattr(CpuBackend, name, staticmethod(mode.kernel(form)))
    monkeypatch.delitem(vocabulary.ARGMAX, "cpu")
    return mode


@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory):
    """The tiny target with a module of random weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(__file__).replace("engine/test_host_reads.py", "plugins"))
        made = importlib.import_module("mtp_checkpoints")
    module = made.tiny_module()
    directory = tmp_path_factory.mktemp("mtp") / "target"
    return made.tiny_target(directory, module.tensors(made.QWEN, 0), mtp_num_hidden_layers=1)


def counted(waits, llm, prompts, params):
    """Waits of each of some decoding steps, after those in which every view and draft is looked at closely."""
    for index in range(3):
        llm.engine.add_request(prompts[index], params.replace(max_tokens=200), str(index))
    for _ in range(NUM_CHECKED_STEPS):
        llm.engine.step()
    counts, below = [], WaitsBelow(waits)
    waits.num_sent = 0
    for _ in range(NUM_STEPS):
        waits.found.clear()
        with below, waits:
            llm.engine.step()
        counts.append(dict(waits.found))
    assert not below.found
    return counts


def drafting(name, target_path, mtp_target, **speculative):
    settings = {"model": str(mtp_target)} if name == "mtp" else {}
    model = {} if name == "mtp" else {"model": str(target_path.parent / name)}
    return make_llm(f"device_steps:{DRAFTERS[name].__name__}", k=K, speculative=model | speculative, **settings)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_plain_step_waits_once_and_sends_its_batch_at_once(params, waits, prompts):
    assert counted(waits, make_llm(), prompts, params) == ONE_WAIT
    assert waits.num_sent == NUM_STEPS, "everything that a step needs"


def test_a_step_with_drafts_from_the_host_waits_once(waits, prompts, sequences):
    llm = make_llm("Scripted", k=K, options={"sequences": sequences, "wrong_every": 3})
    host = host_of(llm)
    host.draft = waits.kernel(host.draft)  # drafts and views of the host lie on the host
    assert counted(waits, llm, prompts, GREEDY) == ONE_WAIT


@pytest.mark.parametrize(("name", "graphs"), covering(list(DRAFTERS), [True, False]))
def test_a_step_with_drafts_from_a_device_waits_once(
    name, graphs, waits, prompts, target_path, mtp_target, monkeypatch
):
    if graphs:
        capture_with(monkeypatch, Replayer)
    llm = drafting(name, target_path, mtp_target)
    assert counted(waits, llm, prompts, GREEDY) == ONE_WAIT
    assert waits.num_sent == 2 * NUM_STEPS, "before the pass, and what became of it"
    assert llm.engine.metrics.acceptance.num_draft_tokens >= 3 * K * NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("name", "distribution"), covering(list(DRAFTERS), ["sparse", "dense"]))
def test_distributions_of_drafts_from_a_device_stay_there(name, distribution, waits, prompts, target_path, mtp_target):
    llm = drafting(
        name,
        target_path,
        mtp_target,
        draft_sample_method="probabilistic",
        proposer_config={"draft_distribution": distribution},
    )
    assert counted(waits, llm, prompts, SAMPLED) == ONE_WAIT


def test_requests_with_penalties_wait_no_oftener(waits, prompts, target_path, mtp_target):
    llm = drafting("medusa", target_path, mtp_target)
    asked = GREEDY.replace(frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={7: 2.0})
    assert counted(waits, llm, prompts, asked) == ONE_WAIT


def test_the_counter_sees_every_way_of_waiting():
    mode = Waits()
    below = WaitsBelow(mode)
    tensor = torch.tensor([1.0, 0.0])
    with below, mode:
        tensor.tolist(), tensor[0].item(), bool(tensor[0]), int(tensor[0]), tensor.nonzero(), tensor.cpu()
        tensor[tensor > 0], tensor.to("cpu"), torch.where(tensor > 0, tensor, 1.0), tensor.masked_select(tensor > 0)
        tensor.repeat_interleave(tensor.long()), torch.equal(tensor, tensor)
    once = ("tolist", "item", "__bool__", "__int__", "nonzero", "cpu", "__getitem__", "to", "where", "masked_select")
    assert mode.found == dict.fromkeys((*once, "repeat_interleave", "equal"), 1)
    assert below.found["_local_scalar_dense"] >= 2


def test_lists_that_travel_together_begin_where_kernels_want_them():
    padded, sizes = aligned([[1, 2, 3], [], [4], [5, 6]], 2)
    assert padded == [1, 2, 3, 0, 4, 0, 5, 6]
    parts = torch.split(torch.tensor(padded), sizes)[::2]
    assert [part.tolist() for part in parts] == [[1, 2, 3], [], [4], [5, 6]]
    assert all(part.storage_offset() % 2 == 0 for part in parts)
