"""The walk of each member of the family."""

from __future__ import annotations

from collections.abc import Callable

from specdec.sdk.checkpoint import Checkpoint

from .checkpoint import DFlashSpec
from .domino import DominoWalk
from .lilicorr import RerankedWalk
from .markov import MarkovWalk
from .selector import SelectorWalk
from .variants import Member
from .walk import Walk
from .xpress import XPressWalk

_WALKS: dict[Member, Callable[[Checkpoint, DFlashSpec], Walk]] = {
    Member.LILICORR: RerankedWalk,
    Member.DFLASH2: SelectorWalk,
    Member.DSPARK: MarkovWalk,
    Member.DOMINO: DominoWalk,
    Member.XPRESS: XPressWalk,
}


def walk_of(checkpoint: Checkpoint, spec: DFlashSpec) -> Walk:
    """Make the walk of a checkpoint; its parameters are filled later. Raises CheckpointError SD-E170, SD-E171 for a
    wrong configuration.
    """
    walk = _WALKS.get(spec.member)
    return Walk() if walk is None else walk(checkpoint, spec)
