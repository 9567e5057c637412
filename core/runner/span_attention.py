"""Chooses how a CPU attends: by our kernel in C where it can be compiled, else by PyTorch."""

from __future__ import annotations

import logging
from typing import Literal

from specdec.sdk import ConfigError
from specdec.sdk.errors import message

from ..kernels.attention import SpanAttention, attend_in_torch
from ..kernels.native.attention import NativeAttention
from ..kernels.native.build import BuildError

logger = logging.getLogger("specdec")

AttentionBackend = Literal["auto", "native", "torch"]


def span_attention(backend: AttentionBackend = "auto") -> SpanAttention:
    """Raises ConfigError SD-E137 if the kernel was asked for and cannot be had; "auto" warns and takes PyTorch's."""
    if backend == "torch":
        return attend_in_torch
    try:
        return NativeAttention.load()
    except BuildError as error:
        facts = {"because": str(error)}
        if backend == "native":
            raise ConfigError("SD-E137", "the attention kernel for a CPU cannot be had", facts) from error
        facts |= {"so": "PyTorch attends, request by request", "fix": "install gcc, or set attention_backend='torch'"}
        logger.warning("%s", message("SD-W304", "the attention kernel for a CPU cannot be had", facts))
        return attend_in_torch
