"""Which of the target's hidden states a checkpoint reads: publishers number them in two ways.

A boundary k is the residual stream after k layers; a layer output k is that of the layer with index k, boundary k + 1.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint, unusable

Convention = Literal["auto", "boundary", "layer_output"]

NAME = "eagle_aux_hidden_state_layer_ids"
_OLDER_NAMES = ("aux_hidden_state_layer_ids", "eagle_config.layer_ids")


def boundaries_of(checkpoint: Checkpoint, num_target_layers: int, convention: Convention) -> tuple[int, ...]:
    """The boundaries in the order in which they are concatenated: the lowest first.

    At the top level ids are boundaries. Inside `eagle_config` they may be either: with `convention` "auto" they are
    boundaries if one of them is the target's last, layer outputs if the first is 1, and boundaries if all are greater.
    A checkpoint without ids reads 2, N // 2 and N - 3. Raises CheckpointError SD-E171 for ids that are unsorted or
    repeated; Refusal for ids that the target does not have or that could be read both ways.
    """
    found = _stated(checkpoint)
    if found is None:
        usual = (2, num_target_layers // 2, num_target_layers - 3)
        if any(a >= b for a, b in pairwise(usual)):
            reason = f"it names no layers, and the usual ones of a target with {num_target_layers} layers are {usual}"
            raise Refusal(reason, f"{NAME} in {checkpoint.config_file}")
        return usual
    name, ids = found
    _check_order(name, ids, checkpoint)
    if convention == "auto":
        convention = _convention(name, ids, num_target_layers)
    boundaries = tuple(each + 1 for each in ids) if convention == "layer_output" else tuple(ids)
    if boundaries[0] < 0 or boundaries[-1] > num_target_layers:
        reason = (
            f"its {name} {ids}, read as {convention.replace('_', ' ')} ids, are the boundaries {boundaries}, "
            f"and the target has 0 .. {num_target_layers}"
        )
        raise Refusal(reason, 'a checkpoint trained for this target, or the other "aux_layer_convention"')
    return boundaries


def _stated(checkpoint: Checkpoint) -> tuple[str, list[int]] | None:
    for name in (NAME, f"eagle_config.{NAME}", *_OLDER_NAMES):
        ids: list[int] | None = checkpoint.get(name, list, None)
        if ids:
            return name, ids
    return None


def _check_order(name: str, ids: list[int], checkpoint: Checkpoint) -> None:
    if any(type(each) is not int for each in ids) or any(a >= b for a, b in pairwise(ids)):
        raise unusable(checkpoint, name, "layer ids in the order in which they are concatenated: the lowest first", ids)


def _convention(name: str, ids: list[int], num_target_layers: int) -> Convention:
    if "." not in name or ids[-1] == num_target_layers:
        return "boundary"
    if ids[0] == 0:
        reason = f"its {name} {ids} may count layer outputs or boundaries"
        raise Refusal(reason, '"aux_layer_convention": "layer_output" or "boundary"')
    return "layer_output" if ids[0] == 1 else "boundary"
