"""A DFlash checkpoint's configuration, whoever published it, as one specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, require_target, unusable
from specdec.sdk.errors import CheckpointError
from specdec.sdk.extensions import AttentionMode
from specdec.sdk.model_proposer.kv_shape import require_positions

from .convolution import ConvolutionShape
from .decoder_config import decoder_config
from .fields import ANYTHING, NUMBER, anywhere, required
from .variants import Member, member_of

MASK_EMBEDDING_FILE = "mask_embedding.pt"
_EMBEDDING_OUTPUT = -1  # as the output of a layer
_ROTARY_KEYS = ("is_neox_style", "rope_is_neox_style")


@dataclass(frozen=True, kw_only=True)
class DFlashSpec:
    """What the network is and how it was trained to be run."""

    member: Member
    decoder: Mapping[str, Any]  # the draft layers' configuration under transformers' names
    boundaries: tuple[int, ...]  # H[k]: the target's residual stream after k layers
    num_target_layers: int | None  # of the target that it was trained for; None: not stated
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int  # slots that it was trained with, the anchor's included
    mask_token_id: int | None  # None: named by `mask_token`, or not needed with a mask embedding of its own
    mask_token: str | None
    has_mask_embedding: bool
    drafts_from_anchor: bool  # slot j predicts the token after it; otherwise the token at it, and the anchor none
    modes: tuple[AttentionMode, ...]  # of each layer
    logit_multiplier: float
    logit_cap: float | None
    embedding_scale: float
    turns_neighbours: bool  # rotary pairs are neighbours, not half a head apart
    convolution: ConvolutionShape | None  # around the sublayers of each layer

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo, sample_from_anchor: bool | None = None) -> DFlashSpec:
        """Read config.json alone.

        sample_from_anchor: whether the anchor's slot drafts. None means what the checkpoint says.

        Raises Refusal for what is not implemented; CheckpointError SD-E170, SD-E171, SD-E282.
        """
        member = member_of(checkpoint)
        _refuse_unserved(checkpoint)
        nested = "speculators_model_type" in checkpoint.config
        layers = "transformer_layer_config." if nested else ""
        decoder, modes = decoder_config(checkpoint, layers, member)
        trained_layers = checkpoint.get("num_target_layers", int, None)
        boundaries = _read_boundaries(checkpoint, member, target.num_layers, len(modes))
        if member is Member.DSPARK and trained_layers == len(boundaries):
            trained_layers = None  # some publishers count the layers that are read
        vocab_size = checkpoint.get(layers + "vocab_size", int, target.vocab_size)
        has_mask_embedding = (checkpoint.directory / MASK_EMBEDDING_FILE).is_file()
        mask_token = anywhere(checkpoint, "mask_token", str)
        find_mask = anywhere if has_mask_embedding or mask_token is not None else required
        return cls(
            decoder=decoder,
            member=member,
            boundaries=boundaries,
            num_target_layers=trained_layers,
            target_hidden_size=checkpoint.get("target_hidden_size", int, decoder["hidden_size"]),
            vocab_size=vocab_size,
            draft_vocab_size=checkpoint.get("draft_vocab_size", int, vocab_size),
            block_size=anywhere(checkpoint, "block_size", int) or checkpoint.get("block_size", int),
            mask_token_id=find_mask(checkpoint, "mask_token_id", int),
            mask_token=mask_token,
            has_mask_embedding=has_mask_embedding,
            drafts_from_anchor=_drafts_from_anchor(checkpoint, member, sample_from_anchor),
            modes=modes,
            logit_multiplier=float(anywhere(checkpoint, "output_multiplier", NUMBER) or 1),
            logit_cap=anywhere(checkpoint, "final_logit_softcapping", NUMBER) or None,
            embedding_scale=float(anywhere(checkpoint, "input_embedding_scale", NUMBER) or 1),
            turns_neighbours=False in (anywhere(checkpoint, name, bool) for name in _ROTARY_KEYS),
            convolution=ConvolutionShape.read(checkpoint, decoder["hidden_size"]),
        )

    @property
    def width(self) -> int:
        """The hidden size of the network."""
        width: int = self.decoder["hidden_size"]
        return width

    @property
    def first_drafting_slot(self) -> int:
        """The slot of the block whose output gives the first draft token."""
        return 0 if self.drafts_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_drafting_slot

    def num_slots(self, num_draft_tokens: int) -> int:
        """The width of the block that drafts this many tokens."""
        return num_draft_tokens + self.first_drafting_slot

    def refuse_own_vocabulary(self) -> None:
        """Raise Refusal unless draft ids are the target's."""
        if self.draft_vocab_size != self.vocab_size:
            reason = f"its draft vocabulary has {self.draft_vocab_size} of {self.vocab_size} tokens"
            raise Refusal(f"{reason}, and {self.member} has none of its own", "a checkpoint with the whole vocabulary")

    def check_fits(self, target: TargetInfo) -> None:
        """Raise Refusal, with the numbers, if the checkpoint was made for another target."""
        num_layers = self.num_target_layers or target.num_layers
        require_target(target, hidden_size=self.target_hidden_size, vocab_size=self.vocab_size, num_layers=num_layers)
        self._check_mask(target)
        require_positions(self.decoder, target)

    def _check_mask(self, target: TargetInfo) -> None:
        mask = self.mask_token_id
        if mask is not None and not 0 <= mask < target.vocab_size and not self.has_mask_embedding:
            reason = f"mask_token_id {mask} has no row in the target's embedding of {target.vocab_size} rows"
            raise Refusal(reason, f"the {MASK_EMBEDDING_FILE} that belongs to this checkpoint, in its directory")


def _refuse_unserved(checkpoint: Checkpoint) -> None:
    served: dict[str, tuple[object, ...]] = {
        "attention_sink_bias": (None, False),
        "attention_value_scale": (None, 1),
        "use_aux_hidden_state": (None, True),
        "layer_ids": (None,),
    }
    for name, values in served.items():
        found = anywhere(checkpoint, name, ANYTHING)
        if found not in values:
            reason = f"its configuration says {name}: {found!r}, which is not implemented"
            raise Refusal(reason, "a checkpoint without it")


def _read_boundaries(checkpoint: Checkpoint, member: Member, num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
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


def _drafts_from_anchor(checkpoint: Checkpoint, member: Member, told: bool | None) -> bool:
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
