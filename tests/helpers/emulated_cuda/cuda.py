"""A CUDA device that is not there, in the place of `torch.cuda`.

    with emulated_cuda(num_devices=2) as cuda:
        x = torch.ones(3, device="cuda:1")  # RuntimeError: the current device is 0
        with torch.cuda.device(1), cuda.counting() as counts:
            (torch.ones(3, device="cuda:1") * 2).sum().item()
        assert counts.figures()["waits"] == 1

Tensors hold real data and compute on the CPU, so results are real. Refused as on a device: tensors of several devices
in one operator, host reads inside of a capture. Refused more strictly than there: any launch while another device is
the current one. torch's own operators would switch by themselves; a Triton kernel and a capture would not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .counts import Counts, place
from .graphs import NOT_PERMITTED, Graph, Stream
from .memory import POISON, Heap, Pool, size_of
from .operators import Operators, held
from .structures import mapped, tensors_in
from .tensor import DeviceTensor


class WrongDevice(RuntimeError):
    """Work was launched while another device was the current one."""


class EmulatedCuda:
    """The devices of a process, and what was asked of them."""

    def __init__(self, num_devices: int, memory: int, *, poison: bool) -> None:
        """memory: bytes of each device. poison: see `Pool`."""
        self.num_devices, self._poison = num_devices, poison
        self.heaps = [Heap(memory) for _ in range(num_devices)]
        self.current = 0  # index of the current device
        self.capture: Graph | None = None
        self.counts = Counts()
        self.run = Operators(self)
        self.mode = _Mode(self)
        self._pools: dict[tuple[int, int], tuple[Any, Pool]] = {}
        self._pinned: dict[int, Tensor] = {}  # address -> kept, so that no other tensor gets it
        self._coming: list[tuple[Tensor, Tensor]] = []  # where on the host, and what is there after the next wait
        self._streams: dict[int, Stream] = {}
        self._defaults: dict[int, Stream] = {}

    @contextmanager
    def counting(self, *, places: bool = False) -> Iterator[Counts]:
        """What is asked of the devices inside. places: also where each launch comes from, which takes long."""
        outer, self.counts = self.counts, Counts(with_places=places)
        try:
            yield self.counts
        finally:
            self.counts = outer

    # ------------------------------------------------------------------ devices and streams
    def device_of(self, device: Any) -> torch.device:
        """The device of a number, a name, a device or None, with its index."""
        if isinstance(device, int):
            return torch.device("cuda", device)
        return self.indexed(torch.device(device or "cuda"))

    def indexed(self, device: torch.device) -> torch.device:
        """A device with its index: the current one's where it has none. Raises RuntimeError for one too many."""
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= self.num_devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return torch.device("cuda", index)

    def exchange(self, index: int) -> int:
        """Make a device the current one; returns which was. Negative: leave it."""
        before = self.current
        if index >= 0:
            self.current = index
        return before

    def check_current(self, device: torch.device, what: str) -> None:
        """Raise WrongDevice where another is the current one."""
        if device.index != self.current:
            raise WrongDevice(f"{what} launched on {device} while cuda:{self.current} is current, at {place()}")

    def default_stream(self, device: Any = None) -> Stream:
        index = self.device_of(device).index
        return self._defaults.setdefault(index, Stream(index))

    def current_stream(self, device: Any = None) -> Stream:
        return self._streams.get(self.device_of(device).index) or self.default_stream(device)

    def set_stream(self, stream: Stream) -> None:
        """The device of a stream becomes the current one, as torch has it."""
        self.current = stream.device.index
        self._streams[self.current] = stream

    # ------------------------------------------------------------------ the host and a device
    def wait(self, what: str) -> None:
        """The host waits for the device. Raises RuntimeError inside of a capture."""
        self._refuse_in_capture(what)
        self.counts.waits[f"{what} @ {place()}"] += 1
        for where, values in self._coming:
            where.copy_(values)
        self._coming.clear()

    def _refuse_in_capture(self, what: str) -> None:
        if self.capture is None or (self.capture.mode != "global" and not self._records()):
            return
        self.capture.is_broken = True
        raise RuntimeError(f"{NOT_PERMITTED}: {what} at {place()}")

    def _records(self) -> bool:
        return self.capture is not None and self.capture.thread == threading.get_ident()

    def pin(self, tensor: Tensor) -> Tensor:
        """Host memory that a device reads by itself. It is kept for as long as the device is."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def upload(self, source: Tensor, what: str, *, non_blocking: bool) -> None:
        """Numbers go to a device: waited for, unless they lie in pinned memory and nobody asked to wait."""
        if self._records():
            self._refuse_in_capture(f"{what} from the host")
        self.counts.uploads[f"{list(source.shape)} @ {place()}"] += 1
        if not (non_blocking and self.is_pinned(source)):
            self.wait(f"{what}, not both pinned and non_blocking")

    def download(self, target: Tensor | None, values: Tensor, *, non_blocking: bool) -> Tensor:
        """Values come from a device, to a target or to new memory, which is pinned for those that nobody waits for.

        They are there after the next wait; until then the memory holds what shows.
        """
        made = torch.empty_like(values) if target is None else target
        if non_blocking and (target is None or self.is_pinned(target)):
            self._refuse_in_capture("copy to the host")
            self._coming.append((made, values.clone()))
            made.reshape(-1).view(torch.uint8).fill_(POISON)
            return made
        self.wait("copy to the host")
        return made.copy_(values)

    # ------------------------------------------------------------------ work
    def finish(
        self, name: str, work: Callable[[], Any], inputs: Sequence[DeviceTensor], device: torch.device, launches: int
    ) -> Any:
        """Run work on the data of its inputs, count it, record it. Returns its result with tensors of the device.

        A view launches nothing, and neither does what has no elements.
        """
        known = {id(each.held): each for each in inputs}
        owners = {each.held.untyped_storage()._cdata: each for each in inputs}
        result = work()
        found = tensors_in(result)
        made = [each for each in found if each.untyped_storage()._cdata not in owners]
        written = [each for each in found if id(each) in known]
        if launches and (any(each.numel() for each in (*made, *written)) or not found):
            self._launch(name, launches, device)
        else:
            launches = 0
        places: list[Tensor] = []

        def wrapped(value: Tensor) -> Tensor:
            if id(value) in known:
                new = known[id(value)]
            elif value.untyped_storage()._cdata in owners:
                new = DeviceTensor(value, device, owners[value.untyped_storage()._cdata].stretch)
            else:
                new = self._made(value, device)
            places.append(new.held)
            return new

        wrapped_result = mapped(result, wrapped)
        if launches and self._records():
            assert self.capture is not None
            self.capture.add(lambda: _again(work, places), launches)
        return wrapped_result

    def _made(self, value: Tensor, device: torch.device) -> DeviceTensor:
        if self._records():
            assert self.capture is not None
            stretch = self.capture.take(size_of(value))
            return DeviceTensor(self.capture.place(stretch, value), device, stretch)
        if self.capture is not None:
            self._refuse_in_capture("memory taken by another thread")
        return DeviceTensor(value, device, self.heaps[device.index].take(value.untyped_storage().nbytes()))

    def _launch(self, name: str, launches: int, device: torch.device) -> None:
        self.check_current(device, name)
        if not self._records():
            self.counts.launches[name] += launches
            if self.counts.with_places:
                self.counts.places[f"{name} @ {place()}"] += launches

    def kernel(self, plain: Callable[..., Any], launches: int) -> Callable[..., Any]:
        """A function of the engine that launches kernels there: its plain form on the data, in its place."""
        name = f"{plain.__module__}.{plain.__qualname__}"

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = tensors_in((args, kwargs))
            strange = {each.device for each in inputs} - {inputs[0].device}
            if strange or not isinstance(inputs[0], DeviceTensor):
                raise RuntimeError(f"{name}: a kernel got tensors on {inputs[0].device} and {strange}")
            self.check_current(inputs[0].device, name)
            there, settings = mapped((args, kwargs), held)
            with torch.inference_mode(False), torch.no_grad():

                def work() -> Any:
                    with self.unwatched():
                        return plain(*there, **settings)

                return self.finish(name, work, inputs, inputs[0].device, launches)

        return call

    def pool(self, handle: Any, device: torch.device) -> Pool:
        """The memory that graphs of one handle share on a device."""
        key = (id(handle), device.index)
        if key not in self._pools:
            self._pools[key] = handle, Pool(self.heaps[device.index], poison=self._poison)
        return self._pools[key][1]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Operators inside are the host's own: nothing of them is seen."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield


def _again(work: Callable[[], Any], places: Sequence[Tensor]) -> None:
    for where, value in zip(places, tensors_in(work()), strict=True):
        if where.data_ptr() != value.data_ptr():
            where.copy_(value)


class _Mode(TorchDispatchMode):
    """Brings operators that have no tensor of ours to the device: those that make one."""

    def __init__(self, cuda: EmulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return self._cuda.run(operator, args, kwargs or {})
