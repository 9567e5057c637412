"""The Triton backend as the tests run it: interpreted on the CPU, in memory full of nonsense, with tiny tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.rejection import DraftRows, SamplingRows, Uniforms, Verdict

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where a kernel means inf - inf to be NaN

Verify = Callable[..., Verdict]
blockwise = partial(triton_backend.verify, together=True)


def workspace_for(logits: Tensor, drafts: DraftRows, tile: int) -> Workspace:
    """Just large enough, and poisoned: what a kernel forgets to write shows."""
    distributions = drafts.distributions
    draft_vocab = (
        0 if distributions is None or distributions.draft_logits is None else distributions.draft_logits.shape[2]
    )
    workspace = Workspace.plan(*drafts.token_ids.shape, logits.shape[1], logits.device, draft_vocab, tile)
    return poisoned(workspace)


def poisoned(workspace: Workspace) -> Workspace:
    for name, buffer in vars(workspace).items():
        if isinstance(buffer, Tensor) and name != "counter":
            buffer.fill_(torch.nan if buffer.is_floating_point() else 77)
    return workspace


def with_tile(tile: int, backend: Verify = triton_backend.verify) -> Verify:
    """`verify` through the kernels with tiles of this many tokens, a power of two."""

    def verify(
        logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, uniforms: Uniforms | None = None
    ) -> Verdict:
        return backend(logits, cu_rows, drafts, sampling, uniforms, workspace_for(logits, drafts, tile))

    return verify
