"""Engines on the emulated device: the plain forms of their kernels stand where the kernels would be launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from specdec.core.kernels import draft_uniforms, path_move, tree_masks
from specdec.core.kernels.layers import naive as layers
from specdec.core.kernels.layers.operations import LAYER_KERNELS
from specdec.core.kernels.paged_attention import dispatch, naive
from specdec.core.rejection import block, sampler, torch_backend, tree
from specdec.core.rejection.types import Verdict

from .cuda import EmulatedCuda

LAUNCHES = {"attention": 2, "verification": 3}
"""Kernels that one call launches, as the forms of a device do."""
FUSED = ("rms_norm", "add_rms_norm", "silu_mul", "rotate", "rotate_and_store")
"""Operations of layers, each one launch."""


@contextmanager
def plain_kernels(cuda: EmulatedCuda) -> Iterator[None]:
    """Inside, calls of the engine's kernels count as launches, and compute what their plain forms do."""
    with ExitStack() as stack:
        attend = cuda.kernel(naive.attend_pages, LAUNCHES["attention"])
        stack.enter_context(patch.dict(dispatch.PAGED_ATTENTION, cuda=attend))
        uniforms = cuda.kernel(draft_uniforms.naive.draft_uniforms, 1)
        stack.enter_context(patch.dict(draft_uniforms.DRAFT_UNIFORMS, cuda=uniforms))
        masks = cuda.kernel(tree_masks.naive.tree_masks, 1)
        stack.enter_context(patch.dict(tree_masks.TREE_MASKS, cuda=masks))
        moves = cuda.kernel(path_move.naive.move_paths, 1)
        stack.enter_context(patch.dict(path_move.MOVE_PATHS, cuda=moves))
        fused = {name: cuda.kernel(getattr(layers, name), 1) for name in FUSED}
        stack.enter_context(patch.dict(LAYER_KERNELS, cuda=lambda: SimpleNamespace(**fused)))
        verify = {"VERIFY_BACKENDS": torch_backend.verify, "BLOCK_BACKENDS": block.verify_block}
        verify["TREE_BACKENDS"] = tree.verify_trees
        for name, plain in verify.items():
            forms = dict(getattr(sampler, name)) | {"cuda": _verification(cuda, plain)}
            stack.enter_context(patch.object(sampler, name, forms))
        yield


def _verification(cuda: EmulatedCuda, plain: Any) -> Any:
    def on_device(logits: Any, cu_rows: Any, drafts: Any, *given: Any, **named: Any) -> Any:
        if not cu_rows[-1]:  # a kernel is compiled by such a call, and prompts are computed in chunks
            nothing = torch.zeros(len(cu_rows) - 1, dtype=torch.int64)
            output_ids = torch.full((len(nothing), drafts.token_ids.shape[1] + 1), -1)
            path = None if drafts.parents is None else output_ids.clone()
            return Verdict(output_ids, nothing, nothing.clone(), nothing.to(torch.uint8), path=path)
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
