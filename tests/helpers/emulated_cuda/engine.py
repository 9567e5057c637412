"""Engines on the emulated device: the plain forms of their kernels stand where the kernels would be launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from specdec.core.kernels import attention, philox, trees
from specdec.core.kernels.cuda import rms_norm as norms
from specdec.core.kernels.cuda.triton_backend import TritonBackend
from specdec.core.kernels.layers.norm import WideRMSNorm
from specdec.core.rejection.sampler import verify_plainly
from specdec.core.rejection.types import Verdict

from .cuda import EmulatedCuda

LAUNCHES = {"attention": 2, "verification": 3}
"""Kernels that one call launches, as the forms of a device do."""


def rms_norm(rows: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """The plain form of the kernel of this name."""
    normal: torch.Tensor = WideRMSNorm(gain, gain, eps)(rows)
    return normal


@contextmanager
def plain_kernels(cuda: EmulatedCuda) -> Iterator[None]:
    """Inside, calls of the engine's kernels count as launches, and compute what their plain forms do."""
    forms = {
        "draft_uniforms": cuda.kernel(philox.draft_uniforms, 1),
        "tree_masks": cuda.kernel(trees.tree_masks, 1),
        "move_paths": cuda.kernel(trees.move_paths, 1),
        "verify": _verification(cuda, verify_plainly),
        "attend_pages": cuda.kernel(attention.attend_pages, LAUNCHES["attention"]),
    }
    with ExitStack() as stack:
        for name, form in forms.items():
            stack.enter_context(patch.object(TritonBackend, name, staticmethod(form)))
        stack.enter_context(patch.object(norms, "rms_norm", cuda.kernel(rms_norm, 1)))
        yield


def _verification(cuda: EmulatedCuda, plain: Any) -> Any:
    def on_device(logits: Any, cu_rows: Any, drafts: Any, *given: Any, **named: Any) -> Any:
        if not cu_rows[-1]:  # a kernel is compiled by such a call, and prompts are computed in chunks
            nothing = torch.zeros(len(cu_rows) - 1, dtype=torch.int64)
            output_ids = torch.full((len(nothing), drafts.token_ids.shape[1] + 1), -1)
            path = None if drafts.parents is None else output_ids.clone()
            return Verdict(output_ids, nothing, nothing.clone(), path=path)
        return replace(
            plain(logits, cu_rows, drafts, *given, **named), on_host=None
        )  # a device's verdict lies there only

    on_device.__qualname__ = plain.__qualname__
    launch = cuda.kernel(on_device, LAUNCHES["verification"])

    def verify(
        logits: Any, cu_rows: Any, drafts: Any, sampling: Any, uniforms: Any = None, workspace: Any = None, **named: Any
    ) -> Any:
        return launch(logits, cu_rows, drafts, sampling, uniforms, **named)

    return verify
