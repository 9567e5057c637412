"""Verifying the drafts of each request in one launch; its plain torch form is `rejection.torch_backend.verify`.

The kernel's arguments come in groups. Fields are tensors, or integers where it says so. Those that change from step to
step are given apart, so that nothing is compiled for their values: in the groups they are 0, and put in by the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """The target's logits and what is known of them by place."""

    logits: Any  # [R, V]
    stride: Any  # int, of a row
    cu_rows: Any  # [B + 1] int64; put in
    maxima: Any  # [B, places, tiles]
    sums: Any  # [B, places, tiles]
    cutoff: Any  # [B, places]; any tensor if the variant has no filters
    vocab_size: Any  # int
    num_places: Any  # int, K + 1; put in
    num_tiles: Any  # int


class Requests(NamedTuple):
    """Drafts, sampling parameters and random numbers; all of it is put in."""

    token_ids: Any  # [B, K] int64
    token_stride: Any  # int
    lengths: Any  # [B] int64
    temperature: Any  # [B] float32
    seed: Any  # [B] int64
    position: Any  # [B] int64
    accept: Any  # [B, K] float64; any tensor if the variant draws its own
    output: Any  # [B, K + 1] float64, likewise
    num_drafts: Any  # int, K


class DenseDistribution(NamedTuple):
    """Draft distributions as probabilities or logits, and statistics of the latter."""

    table: Any  # [B, K, Vd]
    stride: Any  # int, of a request; put in
    step: Any  # int, of a place
    size: Any  # int, Vd
    maxima: Any  # [B, K, draft tiles]
    sums: Any  # [B, K, draft tiles]
    num_tiles: Any  # int
    num_drafts: Any  # int, K; put in


class SparseDistribution(NamedTuple):
    """Draft distributions as M target ids and their probabilities."""

    ids: Any  # [B, K, M] int64
    probs: Any  # [B, K, M]
    num_ids: Any  # int, M
    num_drafts: Any  # int, K; put in


class Distributions(NamedTuple):
    """Draft distributions by request. What the variant lacks may be any tensor."""

    kind: Any  # [B] uint8
    probs: DenseDistribution
    logits: DenseDistribution
    sparse: SparseDistribution
    t2d: Any  # [V] target id -> draft id or -1


class Scratch(NamedTuple):
    """What the programs of one request share."""

    residual: Any  # [B, places, tiles] float32, masses of the tiles of a residual
    counter: Any  # [B] int32, 0 between launches


class Outputs(NamedTuple):
    """The verdict."""

    token_ids: Any  # [B, K + 1] int64
    num_accepted: Any  # [B] int64
    status: Any  # [B] int64


class Variant(NamedTuple):
    """What a kernel is compiled for."""

    tile: int  # logits per tile
    tiles: int  # power of two >= tiles of a row, of target and draft logits
    places: int  # power of two >= K + 1
    shared: bool = False  # several programs work on a request
    drawn: bool = False  # drafts may come with a distribution, of those kinds of the next three that are set
    probs: bool = False  # dense probabilities may occur
    logits: bool = False  # dense logits may occur
    sparse: int = 0  # power of two >= M, 0: no sparse distribution occurs
    mapped: bool = False  # the draft vocabulary is another
    filters: bool = False  # rows have cutoffs
    uniforms: bool = False  # uniforms are given
    block: bool = False  # drafts that come with their distribution are verified together
    skip_last: bool = False  # statistics of each request's last row are missing and made if it is needed
