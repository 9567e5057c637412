"""An EAGLE-3 or P-EAGLE checkpoint's configuration, whoever published it, as one specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, lacks, require_target, unusable
from specdec.sdk.errors import CheckpointError
from specdec.sdk.model_proposer import mask_token_id
from specdec.sdk.model_proposer.kv_shape import require_positions

from .decoder_config import decoder_config
from .names import count_layers, our_shapes
from .recognise import is_eagle
from .variants import refuse_variants

MASK_TENSOR = "mask_hidden"
Convention = Literal["auto", "boundary", "layer_output"]

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_OLDER_NAMES = ("aux_hidden_state_layer_ids", "eagle_config.layer_ids")


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec:
    """What the network is and how it was trained to be run."""

    decoder: Mapping[str, Any]  # the draft layers' configuration under transformers' names
    boundaries: tuple[int, ...]  # H[k]: the target's residual stream after k layers; empty: its final hidden state
    target_hidden_size: int
    embedding_size: int
    vocab_size: int
    draft_vocab_size: int
    has_fc_bias: bool
    norms_features: bool  # one norm over all of them, before the projection
    norms_each_feature: bool  # one norm for each
    has_hidden_norm: bool
    norm_before_residual: bool  # the first layer's residual is the normed state
    feeds_back_normed: bool  # later drafts read the state after the final norm
    mask_token_id: int | None  # None: not trained to draft in parallel

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo, convention: Convention) -> Eagle3Spec:
        """Read config.json and the tensors' shapes. Raises Refusal; CheckpointError SD-E146, SD-E170 .. SD-E175."""
        if is_eagle(checkpoint):
            raise Refusal("this is an EAGLE-1 checkpoint", '"method": "eagle"')
        prefix = "transformer_layer_config." if "speculators_model_type" in checkpoint.config else ""
        shapes = our_shapes(checkpoint)
        refuse_variants(checkpoint, shapes, prefix)
        decoder = decoder_config(checkpoint, prefix, count_layers(shapes, checkpoint), shapes)
        reads_layers = _flag(checkpoint, "use_aux_hidden_state", True)
        vocab_size = checkpoint.get(prefix + "vocab_size", int)
        table = shapes.get("embed_tokens.weight", ())
        spec = cls(
            decoder=decoder,
            boundaries=_boundaries_of(checkpoint, target.num_layers, convention) if reads_layers else (),
            target_hidden_size=checkpoint.get("target_hidden_size", int, decoder["hidden_size"]),
            embedding_size=table[1] if len(table) == 2 else target.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=checkpoint.get("draft_vocab_size", int, vocab_size),
            has_fc_bias="fc.bias" in shapes,
            norms_features=_flag(checkpoint, "norm_before_fc", "input_norm.weight" in shapes),
            norms_each_feature=_flag(
                checkpoint, "fc_norm", _flag(checkpoint, "use_aux_norm", "fc_norm.0.weight" in shapes)
            ),
            has_hidden_norm=reads_layers or "layers.0.hidden_norm.weight" in shapes,
            norm_before_residual=_flag(checkpoint, "norm_before_residual", False),
            feeds_back_normed=_flag(checkpoint, "norm_output", False),
            mask_token_id=_mask_token_id(checkpoint, shapes),
        )
        spec._check_shapes(checkpoint, shapes)
        return spec

    def check_fits(self, target: TargetInfo) -> None:
        """Raise Refusal, with the numbers, if the checkpoint was made for another target."""
        require_target(target, hidden_size=self.target_hidden_size, vocab_size=self.vocab_size)
        require_positions(self.decoder, target)
        width = self.decoder["hidden_size"]
        if not self.boundaries and width != target.hidden_size:
            reason = f"it reads the target's final hidden state of width {target.hidden_size} as its own, {width} wide"
            raise Refusal(reason, "a checkpoint trained for this target")
        mask = self.mask_token_id
        if mask is not None and not 0 <= mask < target.vocab_size:
            reason = f"its mask token {mask} has no row in an embedding of {target.vocab_size} rows"
            raise Refusal(reason, "a checkpoint trained for this target")

    def _check_shapes(self, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise if the features or the first layer's inputs are not those that the configuration describes."""
        fc, count = shapes.get("fc.weight"), len(self.boundaries)
        if count and fc is not None and fc[-1] != count * self.target_hidden_size:
            facts = {
                "expected": f"{count} features (boundaries {self.boundaries}) x {self.target_hidden_size} inputs",
                "found": f"fc.weight {list(fc)}",
                "checkpoint": checkpoint.directory,
            }
            raise CheckpointError("SD-E175", "the draft checkpoint's layer ids do not fit its projection", facts)
        stored = (shapes.get(f"layers.0.self_attn.{name}.weight") for name in ("q_proj", "kv_a_proj_with_mqa"))
        queries, width = next((each for each in stored if each), None), self.decoder["hidden_size"]
        if not count and queries is not None and queries[-1] == width:
            reason = f"its first layer reads {width} inputs: the hidden state alone, without a token's embedding"
            raise Refusal(reason, "a head whose first layer reads both")
        if self.norms_features and self.norms_each_feature:
            raise unusable(checkpoint, "norm_before_fc, fc_norm", "one of them: features are normed once", "both")


def _flag(checkpoint: Checkpoint, name: str, default: bool) -> bool:
    """A field of the top level, or else of `eagle_config`."""
    found: bool = checkpoint.get(name, bool, checkpoint.get(f"eagle_config.{name}", bool, default))
    return found


def _mask_token_id(checkpoint: Checkpoint, shapes: Mapping[str, object]) -> int | None:
    """The mask token of a head that was trained to draft in parallel. Raises CheckpointError SD-E170, SD-E172 if a part
    is absent.
    """
    found = mask_token_id(checkpoint)
    named = checkpoint.get("speculators_model_type", str, "") == "peagle" or any(
        "peagle" in str(name).lower() for name in checkpoint.get("architectures", list, [])
    )
    if MASK_TENSOR not in shapes:
        if named:
            raise lacks(checkpoint, MASK_TENSOR)
        return None
    return found if found is not None else int(checkpoint.get("mask_token_id", int))  # says that it is absent


def _boundaries_of(checkpoint: Checkpoint, num_target_layers: int, convention: Convention) -> tuple[int, ...]:
    """The boundaries in the order in which they are concatenated: the lowest first. Publishers number them in two ways.

    A boundary k is the residual stream after k layers; a layer output k is that of the layer with index k, boundary
    k + 1.

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
            raise Refusal(reason, f"{_LAYER_IDS} in {checkpoint.config_file}")
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
    for name in (_LAYER_IDS, f"eagle_config.{_LAYER_IDS}", *_OLDER_NAMES):
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
