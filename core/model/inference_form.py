"""A network's layers in the form in which they run fastest."""

from __future__ import annotations

from torch import nn

from ..kernels.cpu.backend import Backend
from .quantization import quantize


def prepare(
    network: nn.Module,
    quantization: str | None,
    backend: Backend,
    *,
    keep: nn.Module | None = None,
    room: int | None = None,
    drop: bool = False,
) -> None:
    """Fuse, quantise and lay out the layers of a network, in place.

    keep: a layer that is not quantised. room: the most bytes that second copies of weights may take. None means as many
    as there are. drop: whether weights that only other layouts need leave the network; a proposer's author may look at
    them. Raises ConfigError SD-E176 where the quantisation needs a library that is missing.
    """
    backend.fuse(network)
    if quantization is not None:
        quantize(network, quantization, backend, keep)
    backend.lay_out(network, room=room, drop=drop)
