"""The Triton backend as the tests run it: interpreted on the CPU, in memory full of nonsense, with tiny tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from specdec.core.kernels.cuda import verification as triton_backend
from specdec.core.kernels.cuda.verdict import Rows
from specdec.core.kernels.cuda.workspace import Workspace
from specdec.core.kernels.filters import FilterRows
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
    with pytest.MonkeyPatch.context() as patch:
        for name in ("row_stats", "filter_rows"):
            patch.setattr(triton_backend, name, _once(getattr(triton_backend, name)))
        yield


def _once(kernel: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[bytes, str], list[Tensor]] = {}

    def made(rows: Rows, cu_rows: Tensor, temperature: Tensor, *others: FilterRows | int) -> None:
        num_places = rows.maxima.shape[1]
        for b, (start, end) in enumerate(pairwise(cu_rows.tolist())):
            one, places = slice(b, b + 1), slice(b * num_places, (b + 1) * num_places)
            own = [each.part(one) if isinstance(each, FilterRows) else each for each in others]
            filled = {"maxima": rows.maxima[one], "sums": rows.sums[one]}
            if rows.cutoff is not None:
                filled["cutoff"] = rows.cutoff[places]
            alone = rows._replace(logits=rows.logits[start:end], **filled)
            read = alone.logits, temperature[one], *(each for filters in own for each in _tensors_of(filters))
            key = b"".join(map(_bytes_of, read)), str([each for each in own if not isinstance(each, FilterRows)])
            if key not in known:
                kernel(alone, torch.tensor([0, end - start]), temperature[one], *own)
                known[key] = [each.clone() for each in filled.values()]
            for each, value in zip(filled.values(), known[key], strict=True):
                each.copy_(value)

    return made


def _tensors_of(filters: FilterRows | int) -> list[Tensor]:
    return [filters.top_k, filters.top_p, filters.min_p] if isinstance(filters, FilterRows) else []


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
