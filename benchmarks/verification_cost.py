"""What a step of verification must read, and what the kernels read: bytes and launches from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.kernels.cuda.launch import TILE

BYTES_OF_TILE_STATS = 8  # a maximum and a sum, float32


@dataclass(frozen=True)
class Step:
    """The shapes of one step."""

    num_requests: int
    num_drafts: int  # per request
    vocab_size: int
    bytes_per_logit: int
    bytes_per_distribution: int = 0  # of one number of a dense draft distribution; 0: no dense distribution
    distribution_statistics: bool = False  # the dense distribution is logits whose maximum and mass are not known yet
    sparse_ids: int = 0
    filters: bool = False


def minimum_bytes(step: Step, acceptance: float) -> float:
    """Every draft row once; the last row if all drafts are accepted; a residual's two rows if one is rejected.

    acceptance is the probability that a draft is accepted, given that those before it were.
    """
    all_accepted = acceptance**step.num_drafts
    row = step.vocab_size * step.bytes_per_logit
    distribution_row = step.vocab_size * step.bytes_per_distribution
    rows = step.num_drafts * row + all_accepted * row
    if step.bytes_per_distribution:
        rows += (1 - all_accepted) * (row + distribution_row)
    if step.distribution_statistics:
        rows += step.num_drafts * distribution_row
    return step.num_requests * rows


def moved_bytes(step: Step, acceptance: float) -> float:
    """What the kernels read and write: the minimum, the tile statistics, and the tiles that tokens are drawn from.

    Top-k and top-p read surviving tiles several times; how often depends on the logits and is left out.
    """
    num_tiles = -(-step.vocab_size // TILE)
    stats = (step.num_drafts + 1) * num_tiles * BYTES_OF_TILE_STATS
    if step.distribution_statistics:
        stats += step.num_drafts * num_tiles * BYTES_OF_TILE_STATS
    verified = sum(acceptance**i for i in range(step.num_drafts))
    tile = TILE * step.bytes_per_logit
    one_hot = not step.bytes_per_distribution and not step.sparse_ids
    tiles = (verified * tile if one_hot else 0) + tile + TILE * step.bytes_per_distribution
    sparse = verified * step.sparse_ids * 12
    every_row = step.vocab_size * step.bytes_per_logit * (1 - acceptance**step.num_drafts) if step.filters else 0
    extra = 2 * stats + tiles + sparse + every_row
    return minimum_bytes(step, acceptance) + step.num_requests * extra


def num_launches(step: Step) -> int:
    """Kernels launched: statistics (none for plain sampling, whose only row the verdict reads), filters, verdict."""
    statistics = 1 if step.num_drafts or step.filters else 0
    return statistics + step.distribution_statistics + step.filters + 1
