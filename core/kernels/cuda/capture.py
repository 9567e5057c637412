"""What captures work on a device, to launch it again as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Work = Callable[[], None]


class CudaCapturer:
    """CUDA graphs that share one pool of memory: at most one of them is running.

    A launch may overwrite all that another graph keeps in the pool. So captured work leaves its results elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, work: Work) -> Work:
        """Capture the work. Returns what launches it. Raises RuntimeError if it cannot be captured.

        Two runs before, on the capturer's stream, compile kernels and make workspaces.
        """
        current, aside = torch.cuda.current_stream(self._stream.device), self._stream
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # around the capture too: one that fails does not leave its stream by itself
            work()
            work()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, aside, capture_error_mode="thread_local"):
                work()
        current.wait_stream(aside)
        return graph.replay


def copy_together(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each tensor to its place, in one launch for those of one dtype."""
    together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        if len(value):
            to, given = together.setdefault(value.dtype, ([], []))
            to.append(place)
            given.append(value)
    for to, given in together.values():
        torch._foreach_copy_(to, given)


def fill_together(filled: Iterable[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Fill each place with what is given, and behind that with as much of a padding as there is room for."""
    places: list[Tensor] = []
    values: list[Tensor] = []
    for place, given, padding in filled:
        places += [place[: len(given)], place[len(given) :]]
        values += [given, padding[: len(place) - len(given)]]
    copy_together(places, values)
