"""The Triton backend as the tests run it: interpreted on the CPU, in memory full of nonsense, with tiny tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.kernels.cuda.row_stats import TileStats
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


@contextmanager
def each_row_once() -> Iterator[None]:
    """Statistics and cutoffs of requests with equal rows are made once, whatever they are verified beside.

    An interpreted filter takes a second for each row, and a proof verifies few rows under many uniforms. That company
    changes nothing of a row, others test (test_order_and_company_of_requests_change_no_bit).
    """
    by_kernel, known = triton_backend._statistics, dict[bytes, tuple[Tensor, ...]]()

    def statistics(
        logits: Tensor, cu_rows: Tensor, sampling: SamplingRows, num_drafts: int, workspace: Workspace, **options: bool
    ) -> TileStats:
        num_requests, num_places = len(cu_rows) - 1, num_drafts + 1
        stats = workspace.stats(num_requests, num_places, logits.shape[1])
        cutoff = workspace.cutoff[: num_requests * num_places].view(num_requests, num_places)
        for b, (start, end) in enumerate(pairwise(cu_rows.tolist())):
            rows, own = logits[start:end], {name: getattr(sampling, name)[b : b + 1] for name in OF_A_ROW}
            key = b"".join(bytes_of(each) for each in (rows, *own.values()))
            if key not in known:
                alone = poisoned(Workspace.plan(1, num_drafts, logits.shape[1], logits.device, tile=workspace.tile))
                cu_row = torch.tensor([0, end - start])
                made = by_kernel(rows, cu_row, replace(sampling, **own), num_drafts, alone, **options)
                known[key] = tuple(each[: end - start] for each in (made.maxima[0], made.sums[0], alone.cutoff))
            for each, value in zip((stats.maxima, stats.sums, cutoff), known[key], strict=True):
                each[b, : end - start] = value
        return stats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "_statistics", statistics)
        yield


OF_A_ROW = ("temperature", "top_k", "top_p", "min_p")


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
