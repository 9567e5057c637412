"""Streams, events and CUDA graphs of the emulated device: work is done when it is launched, captures record it."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .memory import Pool, Stretch, merged

if TYPE_CHECKING:
    from .cuda import EmulatedCuda

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class Stream:
    """Of a device. All work is done at once, so that streams have nothing to wait for."""

    cuda: EmulatedCuda

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = self.cuda.device_of(device)
        self.cuda_stream = 0

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        self.cuda.wait("Stream.synchronize")

    def query(self) -> bool:
        return True


class Event:
    """A place in a stream."""

    cuda: EmulatedCuda

    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.wait("Event.synchronize")

    def elapsed_time(self, other: Event) -> float:
        return 1.0


class Graph:
    """Recorded work: operators on fixed memory. A replay runs no line of Python above them."""

    cuda: EmulatedCuda

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes = 0
        self._steps: list[Callable[[], None]] = []
        self._used: list[tuple[int, int]] = []  # stretches of the pool
        self._outputs: dict[int, int] = {}  # those that tensors still lie upon: start -> size
        self._pool: Pool
        self.device: torch.device
        self.mode = "global"
        self.is_broken = False
        self.thread = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **options: Any) -> None:
        if self.cuda.capture is not None:
            raise RuntimeError(NOT_PERMITTED)
        self.device, self.mode, self.thread = self.cuda.device_of(None), capture_error_mode, threading.get_ident()
        self._pool = self.cuda.pool(pool if pool is not None else object(), self.device)
        self.cuda.capture = self

    def capture_end(self) -> None:
        self.cuda.capture = None
        self._used = merged(self._used)
        if self.is_broken:
            raise RuntimeError(INVALIDATED)
        if not self.nodes:
            warnings.warn("The CUDA Graph is empty. This usually means that the graph was not captured", stacklevel=2)
        self._pool.spoil(self._used, [])  # nothing ran yet: what a capture returns is not computed before a replay

    def pool(self) -> Any:
        return self._pool

    def reset(self) -> None:
        self._steps.clear()

    def replay(self) -> None:
        self.cuda.check_current(self.device, "a graph")
        with self.cuda.unwatched(), torch.inference_mode(False), torch.no_grad():
            for step in self._steps:
                step()
        self.cuda.counts.replays += 1
        self.cuda.counts.nodes += self.nodes
        self._pool.spoil(self._used, list(self._outputs.items()))

    # ------------------------------------------------------------------ while it records
    def add(self, step: Callable[[], None], launches: int) -> None:
        """Work that a replay does again."""
        self._steps.append(step)
        self.nodes += launches

    def take(self, num_bytes: int) -> Stretch:
        """Memory of the pool, for a tensor that is made while this records."""
        stretch = self._pool.take(num_bytes)
        self._used.append((stretch.start, stretch.size))
        self._outputs[stretch.start] = stretch.size
        weakref.finalize(stretch, self._outputs.pop, stretch.start, None)
        return stretch

    def place(self, stretch: Stretch, like: torch.Tensor) -> torch.Tensor:
        """See `Pool.place`."""
        return self._pool.place(stretch, like)
