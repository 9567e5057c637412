"""A network's layers in the form in which they run fastest."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..kernels.arrange import arrange_for_cpu
from ..kernels.fused_linear import fuse_linears
from ..kernels.linear import packable_bytes
from ..kernels.native.kernels import NativeKernels
from .quantization import quantize


def prepare_causal_lm(
    model: Any, quantization: str | None, kernels: NativeKernels | None, room: int | None = None
) -> None:
    """Fuse, quantise and lay out the linear layers of a transformers causal LM, in place.

    Its head is not quantised. Weights that only other layouts need are dropped. kernels: those of a CPU. room: the
    most bytes that second copies of the others may take; None: as many as there are. Raises ConfigError SD-E176 where
    the quantisation needs a library that is missing.
    """
    fuse_linears(model)
    if quantization is not None:
        quantize(model, quantization, keep=model.get_output_embeddings())
    arrange_for_cpu(model, kernels, pack=room is None or packable_bytes(model, kernels) <= room, drop=True)


def prepare_network(network: nn.Module, quantization: str | None, kernels: NativeKernels | None) -> None:
    """The same for a network of a proposer, whose author may look at its parameters: all of them stay."""
    fuse_linears(network)
    if quantization is not None:
        quantize(network, quantization)
    arrange_for_cpu(network, kernels, pack=True, drop=False)
