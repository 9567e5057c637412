"""How often a step reads back from its device: each time the host waits until everything before is computed.

A step is run on the CPU as a GPU would run it (block table, kept rows in the device form), and every call of a tensor
method that needs values on the host is counted; so is `where` with a number, which is copied to the device and waited
for. What the kernels of a GPU do without the host, their plain forms do in Python: those are not counted. `tests/gpu`
counts the real ones.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from engine_helpers import GREEDY, make_llm
from torch.overrides import TorchFunctionMode

from specdec import SamplingParams
from specdec.core import assembly
from specdec.core.kernels.paged_attention import dispatch
from specdec.core.rejection import sampler
from specdec.core.runner import views
from specdec.plugins.eagle.proposer import Eagle3Proposer

K = 3
NUM_CHECKED_STEPS = 18
READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
SAMPLED = SamplingParams(temperature=0.8, max_tokens=48, ignore_eos=True, seed=1)


class Reads(TorchFunctionMode):
    """Counts calls that read values, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self.inside_kernel = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        copies = name == "where" and not all(isinstance(each, torch.Tensor) for each in args)
        if (name in READS or copies) and not self.inside_kernel:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))

    def kernel(self, plain):
        """A plain form that stands for a kernel."""

        def call(*args, **kwargs):
            self.inside_kernel = True
            try:
                return plain(*args, **kwargs)
            finally:
                self.inside_kernel = False

        return call


class DeviceEagle3(Eagle3Proposer):
    """Behaves as on a device, where asking which rows want drafts would wait."""

    @classmethod
    def needs(cls, config, target):
        return super().needs(config, target).replace(placement="device")

    def wanted(self, step):
        return None

    @staticmethod
    def most_wanted(step):
        return step.num_draft_tokens


@pytest.fixture
def reads(monkeypatch):
    mode = Reads()
    monkeypatch.setitem(assembly.ADDRESSING, "cpu", assembly.ADDRESSING["cuda"])
    monkeypatch.setitem(dispatch.PAGED_ATTENTION, "cpu", mode.kernel(dispatch.PAGED_ATTENTION["cpu"]))
    monkeypatch.setattr(sampler, "VERIFY_BACKENDS", {"cpu": mode.kernel(sampler.VERIFY_BACKENDS["cpu"])})
    monkeypatch.setattr(views, "uniform", mode.kernel(views.uniform))
    return mode


def counted(reads, llm, prompts, params, num_steps=6):
    """Reads of each of some decoding steps, after those in which every view and draft is looked at closely."""
    for index in range(3):
        llm.engine.add_request(prompts[index], params.replace(max_tokens=200), str(index))
    for _ in range(NUM_CHECKED_STEPS):
        llm.engine.step()
    counts = []
    for _ in range(num_steps):
        reads.found.clear()
        with reads:
            llm.engine.step()
        counts.append(dict(reads.found))
    return counts


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_plain_step_reads_once(params, reads, prompts):
    assert counted(reads, make_llm(), prompts, params) == [{"tolist": 1}] * 6


def test_a_step_with_drafts_from_a_device_reads_once_more(reads, prompts, target_path):
    """The outcome of verification, then the drafts and their lengths."""
    speculative = {"model": str(target_path.parent / "eagle3")}
    llm = make_llm(f"{__name__}:DeviceEagle3", k=K, speculative=speculative)
    assert counted(reads, llm, prompts, GREEDY) == [{"tolist": 2}] * 6
    assert llm.engine.metrics.acceptance.num_accepted_tokens > 0


def test_laws_of_drafts_from_a_device_are_kept_there(reads, prompts, target_path):
    """Beyond the drafts only the kind of each row's law is read: where it is checked, and where it is stored."""
    speculative = {"model": str(target_path.parent / "eagle3"), "draft_sample_method": "probabilistic"}
    llm = make_llm(f"{__name__}:DeviceEagle3", k=K, speculative=speculative)
    assert counted(reads, llm, prompts, SAMPLED) == [{"tolist": 4}] * 6


def test_the_counter_sees_every_way_of_reading():
    with Reads() as mode:
        tensor = torch.tensor([1.0, 0.0])
        tensor.tolist(), tensor[0].item(), bool(tensor[0]), int(tensor[0]), tensor.nonzero(), tensor.cpu()
    assert mode.found == {"tolist": 1, "item": 1, "__bool__": 1, "__int__": 1, "nonzero": 1, "cpu": 1}
