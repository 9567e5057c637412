"""Steps as a GPU runs them, on a CPU: what is read back, what is sent, what is captured.

Block tables, the device form of views and a capturer that stands in for CUDA graphs are put in the CPU's backend.
What kernels do without the host, their plain forms do in Python: that is not counted.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.core.engine.device import PROFILES
from specdec.core.kernels.cuda.addressing import DeviceAddressing
from specdec.core.kernels.cuda.graphs import Passes
from specdec.plugins.dflash.proposer import DFlashProposer
from specdec.plugins.draft_model.proposer import DraftModelProposer
from specdec.plugins.eagle.proposer import Eagle3Proposer, EagleProposer
from specdec.plugins.medusa.proposer import MedusaProposer
from specdec.plugins.mtp.proposer import MtpProposer

READS = {
    "tolist", "item", "cpu", "numpy", "equal", "allclose", "is_nonzero",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__iter__",
}  # fmt: skip
INDEXES = {"__getitem__", "__setitem__", "index_put_", "index_put", "index"}


def give_cpu(monkeypatch, backend=None, **ways):
    """Engines on a CPU do something in another way than a CPU's own: attributes of its backend, or of the one given."""
    make = PROFILES["cpu"]

    def made(*args):
        profile = make(*args)
        own = copy(backend or profile.backend)
        vars(own).update(ways)
        return replace(profile, backend=own)

    monkeypatch.setitem(PROFILES, "cpu", made)


def address_by_table(monkeypatch):
    """Engines on a CPU address KV as on a GPU."""
    give_cpu(monkeypatch, addressing=DeviceAddressing)


def capture_with(monkeypatch, capturer):
    """Engines on a CPU capture their passes. capturer: makes what captures, of a device."""
    passes = SimpleNamespace(of=partial(Passes.of, capturer=capturer), num_tokens=Passes.num_tokens)
    give_cpu(monkeypatch, passes=passes)


class Waits(TorchFunctionMode):
    """Counts calls that would wait for a device, by name, and transfers to it: `torch.tensor` of numbers."""

    def __init__(self):
        super().__init__()
        self.found = Counter()
        self.num_sent = 0
        self.inside_kernel = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if not self.inside_kernel:
            self.num_sent += name in ("tensor", "as_tensor", "from_numpy")
            if name in READS or self._waits(name, args, kwargs):
                self.found[name] += 1
        return function(*args, **kwargs)

    @staticmethod
    def _waits(name, args, kwargs):
        """Calls that wait with some arguments only."""
        if name == "where":  # a number is copied to the device and waited for
            return not all(isinstance(each, Tensor) for each in args)
        if name == "repeat_interleave":  # the size of what it gives is asked for
            return isinstance(args[1], Tensor) and kwargs.get("output_size") is None
        if name == "to":
            return "cpu" in (*args[1:], *kwargs.values())  # by name: a device that is asked for may be another there
        if name in INDEXES:
            places = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in places)
        return False

    def kernel(self, plain):
        """A plain form that stands for a kernel."""

        def call(*args, **kwargs):
            before, self.inside_kernel = self.inside_kernel, True
            try:
                return plain(*args, **kwargs)
            finally:
                self.inside_kernel = before

        return call


class WaitsBelow(TorchDispatchMode):
    """The same where operators call others: reads of one number, and of how many entries are not zero."""

    def __init__(self, above: Waits):
        super().__init__()
        self.found = Counter()
        self._above = above

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2") and not self._above.inside_kernel:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


class Replayer:
    """A capturer that runs the work when it is told to capture it, and again at every replay; counts both."""

    def __init__(self, device=None):
        self.num_captured = self.num_replays = 0
        self.is_running = False

    def capture(self, work):
        self._run(work)
        self.num_captured += 1

        def replay():
            self.num_replays += 1
            self._run(work)

        return replay

    def _run(self, work):
        self.is_running = True
        work()
        self.is_running = False


class OnDevice:
    """Mixed into a proposer: shown what a device would be shown, where asking which rows want drafts would wait."""

    @classmethod
    def needs(cls, config, target):
        return super().needs(config, target).replace(placement="device")

    def wanted(self, step):
        return None

    @staticmethod
    def most_wanted(step):
        return step.width


class DeviceEagle(OnDevice, EagleProposer):
    pass


class DeviceEagle3(OnDevice, Eagle3Proposer):
    pass


class DeviceDFlash(OnDevice, DFlashProposer):
    pass


class DeviceMedusa(OnDevice, MedusaProposer):
    pass


class DeviceDraftModel(OnDevice, DraftModelProposer):
    pass


class DeviceMtp(OnDevice, MtpProposer):
    pass


DRAFTERS = {
    "eagle": DeviceEagle,
    "eagle3": DeviceEagle3,
    "dflash": DeviceDFlash,
    "medusa": DeviceMedusa,
    "draft": DeviceDraftModel,
    "mtp": DeviceMtp,
}
