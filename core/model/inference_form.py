"""A network's layers in the form in which they run fastest."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..kernels.cpu.backend import Backend
from .quantization import quantize


def prepare_causal_lm(model: Any, quantization: str | None, backend: Backend, room: int | None = None) -> None:
    """Fuse, quantise and lay out the linear layers of a transformers causal LM, in place.

    Its head is not quantised. Weights that only other layouts need are dropped. room: the most bytes that second copies
    of the others may take. None means as many as there are. Raises ConfigError SD-E176 where the quantisation needs a
    library that is missing.
    """
    backend.fuse(model)
    if quantization is not None:
        quantize(model, quantization, backend, keep=model.get_output_embeddings())
    backend.lay_out(model, pack=room is None or backend.packable_bytes(model) <= room, drop=True)


def prepare_network(network: nn.Module, quantization: str | None, backend: Backend) -> None:
    """The same for a network of a proposer, whose author may look at its parameters: all of them stay."""
    backend.fuse(network)
    if quantization is not None:
        quantize(network, quantization, backend)
    backend.lay_out(network, pack=True, drop=False)
