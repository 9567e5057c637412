"""Where publishers mean different things by one key: ids of the target's layers, and the slot that drafts first."""

from __future__ import annotations

from itertools import pairwise

from specdec.sdk import Refusal
from specdec.sdk.checkpoint import Checkpoint, unusable
from specdec.sdk.errors import CheckpointError

from .fields import anywhere, required
from .variants import Member

_EMBEDDING_OUTPUT = -1  # as the output of a layer


def read_boundaries(checkpoint: Checkpoint, member: Member, num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Which hidden states it reads. `speculators` counts boundaries; elsewhere id k is layer k's output: H[k+1].

    Raises CheckpointError SD-E170, SD-E171; Refusal.
    """
    if "speculators_model_type" in checkpoint.config:
        name, shift, lowest = "aux_hidden_state_layer_ids", 0, 0
        ids = checkpoint.get(name, list)
    else:
        name, shift, lowest = "target_layer_ids", 1, _EMBEDDING_OUTPUT if member is Member.DSPARK else 0
        ids = (required if member is Member.DSPARK else anywhere)(checkpoint, name, list)
        if ids is None:
            ids = _usual_layer_ids(num_layers, num_draft_layers)
    if any(type(each) is not int for each in ids) or any(a >= b for a, b in pairwise([lowest - 1, *ids])) or not ids:
        raise unusable(checkpoint, name, "layer ids in the order in which they are concatenated: the lowest first", ids)
    if shift and member is Member.DSPARK and ids[-1] + shift == num_layers:
        reason = (
            f"target_layer_ids names the last layer ({ids[-1]}), whose output DSpark's trainers take behind the final "
            "norm or before it"
        )
        raise Refusal(reason, "a checkpoint that reads earlier layers")
    return tuple(each + shift for each in ids)


def drafts_from_anchor(checkpoint: Checkpoint, member: Member, told: bool | None) -> bool:
    """Whether slot j drafts the token after its place; otherwise the one at it, and the anchor's slot none.

    told: what the user says. None means what the checkpoint says.

    Raises CheckpointError SD-E282 where a missing key means either.
    """
    key = "shift_label" if member is Member.DOMINO else "sample_from_anchor"
    stated = anywhere(checkpoint, key, bool) if told is None else told
    if stated is None and member is Member.DSPARK:
        if "speculators_model_type" in checkpoint.config:
            facts = {
                "field": "sample_from_anchor",
                "file": checkpoint.config_file,
                "why": "files from before July 2026 lack it and mean false; readers since then take true",
                "fix": 'say which it is: "sample_from_anchor": false, or true, in speculative_config',
            }
            raise CheckpointError("SD-E282", "the draft checkpoint does not say which slot drafts first", facts)
        return True
    return bool(stated)


def _usual_layer_ids(num_layers: int, num_draft_layers: int) -> list[int]:
    """Where DFlash's published models read the target if their configuration does not say so."""
    if num_draft_layers == 1:
        return [num_layers // 2]
    return [round(1 + index * (num_layers - 4) / (num_draft_layers - 1)) for index in range(num_draft_layers)]
