"""The backends of a CPU: by our kernels in C, and by PyTorch where there is no compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from specdec.sdk.errors import ConfigError, message

from ..backend import Backend
from ..layers.fused_linear import fuse_linears
from ..layers.norm import Spelled, fuse_rms_norms
from .layers import (
    LinearForm,
    NativeLinear,
    NativeRMSNorm,
    PackedLinear,
    delta_rule,
    narrow_linears,
    onednn_multiplies,
    pack_linears,
    packable_bytes,
)
from .native.build import BuildError
from .native.kernels import DTYPES, NativeKernels

logger = logging.getLogger("specdec")


class CpuBackend(Backend):
    """PyTorch on a CPU, with fewer and larger operations."""

    @classmethod
    def load(cls, choice: str) -> CpuBackend:
        """Make the backend. Raises ConfigError SD-E137 where "native" cannot be had; "auto" warns, SD-W304."""
        if choice == "torch":
            return cls()
        try:
            return NativeBackend(NativeKernels.load())
        except BuildError as error:
            facts = {"because": str(error)}
            if choice == "native":
                raise ConfigError("SD-E137", "the kernels for a CPU cannot be had", facts) from error
            facts |= {"so": "PyTorch computes, more slowly", "fix": "install gcc, or set cpu_kernels='torch'"}
            logger.warning("%s", message("SD-W304", "the kernels for a CPU cannot be had", facts))
            return cls()

    def fuse(self, network: nn.Module) -> None:
        fuse_linears(network)

    def narrow(self, network: nn.Module, keep: nn.Module | None) -> bool:
        narrow_linears(network, keep)
        return True

    def lay_out(self, network: nn.Module, *, room: int | None, drop: bool) -> None:
        if room is None or packable_bytes(network, self.linear_form) <= room:
            pack_linears(network, self.linear_form, drop=drop)
        fuse_rms_norms(network, self.norm_form)

    def linear_form(self, layer: nn.Linear) -> LinearForm | None:
        """What serves a plain layer faster. None means that it stays."""
        return PackedLinear if onednn_multiplies(layer.weight, "amx_bf16", "avx512_bf16") else None

    def norm_form(self, spelled: Spelled) -> nn.Module:
        """What serves a norm."""
        return spelled


class NativeBackend(CpuBackend):
    """Kernels in C. Where the processor multiplies matrices of bfloat16, oneDNN has these."""

    is_batch_invariant = True

    def __init__(self, kernels: NativeKernels) -> None:
        self.kernels = kernels
        self.attend = kernels.attend

    def serves_heads(self, dtype: torch.dtype, *sizes: int) -> bool:
        return self.kernels.serves_heads(dtype, *sizes)

    def serves(self, module: nn.Module) -> bool:
        return isinstance(module, NativeLinear)

    def recurrences(self) -> Mapping[str, Callable[..., tuple[Tensor, Tensor]]]:
        return {"gated_delta_rule": partial(delta_rule, self.kernels)}

    def linear_form(self, layer: nn.Linear) -> LinearForm | None:
        if self.kernels.can_pack(layer.weight) and not onednn_multiplies(layer.weight, "amx_bf16"):
            return partial(NativeLinear, kernels=self.kernels)
        return super().linear_form(layer)

    def norm_form(self, spelled: Spelled) -> nn.Module:
        return NativeRMSNorm(spelled, self.kernels) if spelled.weight.dtype in DTYPES else spelled
