"""Verifying the drafts of each request in one launch; its plain torch form is `rejection.torch_backend.verify`.

The kernels' arguments come in groups, which a kernel gathers in a `Batch`. Fields are tensors, or integers where it
says so. A kernel is compiled for what is None. Triton 3.6 cannot ask whether a group is None that holds a None itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Requests(NamedTuple):
    """Drafts, sampling parameters and random numbers.

    They change from step to step, so they are arguments of their own: nothing is compiled for their values.
    """

    cu_rows: Any  # [B + 1] int64
    token_ids: Any  # [B, K] int64
    token_stride: Any  # int
    lengths: Any  # [B] int64
    temperature: Any  # [B] float32
    seed: Any  # [B] int64
    position: Any  # [B] int64
    accept: Any  # [B, K] float64; None: the kernel draws its own
    output: Any  # [B, K + 1] float64, likewise
    num_drafts: Any  # int, K
    parents: Any  # [B, K] int64, dense; None: chains
    replacement: Any  # [B] bool, whether siblings in a tree were put back; None: none were


class Rows(NamedTuple):
    """The target's logits and what is known of them by place."""

    logits: Any  # [R, V]
    stride: Any  # int, of a row
    maxima: Any  # [B, places, tiles]
    sums: Any  # [B, places, tiles]
    cutoff: Any  # [B, places]; None: no request filters
    vocab_size: Any  # int
    num_tiles: Any  # int


class DenseProbs(NamedTuple):
    """Draft distributions as probabilities."""

    table: Any  # [B, K, Vd], dense
    size: Any  # int, Vd


class DenseLogits(NamedTuple):
    """Draft distributions as logits, and statistics of these."""

    table: Any  # [B, K, Vd], dense
    size: Any  # int, Vd
    maxima: Any  # [B, K, draft tiles]
    sums: Any  # [B, K, draft tiles]
    num_tiles: Any  # int


class SparseDistribution(NamedTuple):
    """Draft distributions as M target ids and their probabilities."""

    ids: Any  # [B, K, M] int64
    probs: Any  # [B, K, M]
    num_ids: Any  # int, M


class Distributions(NamedTuple):
    """Draft distributions by request, of those kinds that may occur."""

    kind: Any = None  # [B] uint8; None: every draft is one-hot
    probs: Any = None  # DenseProbs
    logits: Any = None  # DenseLogits
    sparse: Any = None  # SparseDistribution
    t2d: Any = None  # [V] target id -> draft id or -1; None: the draft vocabulary is the target's


class Scratch(NamedTuple):
    """What the programs of one request share."""

    residual: Any  # [B, places, tiles] float32, masses of the tiles of a residual
    counter: Any  # [B] int32, 0 between launches


class Outputs(NamedTuple):
    """The verdict."""

    token_ids: Any  # [B, K + 1] int64
    num_accepted: Any  # [B] int64
    status: Any  # [B] int64
    path: Any  # [B, K + 1] int64; None: chains


class Batch(NamedTuple):
    """All that a kernel is given."""

    requests: Requests
    rows: Rows
    distributions: Distributions
    scratch: Scratch
    outputs: Outputs


class Variant(NamedTuple):
    """What a kernel is compiled for besides."""

    tile: int  # logits per tile
    tiles: int  # power of two >= tiles of a row, of target and draft logits
    places: int  # power of two >= K + 1
    sparse: int = 0  # power of two >= M, 0: no sparse distribution occurs
    shared: bool = False  # several programs work on a request
    block: bool = False  # drafts that come with their distribution are verified together
    skip_last: bool = False  # statistics of each request's last row are missing and made if it is needed
