"""A Medusa checkpoint, whoever published it, as one specification and under one layout's names.

Two layouts are in use: `{head}.{layer}.linear.*` with `{head}.{L}.weight` (FasterDecoding, in medusa_lm_head.pt), and
`blocks.{head}.layers.{layer}.*` with `lm_heads.{head}.weight` or one `lm_head` (vLLM). The second is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, lacks, require_target

from .recognise import refuse_relatives

PREFIXES = ("medusa_head.", "medusa_heads.")
TOKEN_MAP = "token_map"

_LAYER = re.compile(r"(?:blocks\.(\d+)\.layers\.(\d+)|(\d+)\.(\d+)\.linear)\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True, kw_only=True)
class MedusaSpec:
    """What is stored. The tensors decide: published configurations are known to state other numbers of heads."""

    names: Mapping[str, str]  # our name of each stored tensor that belongs to the heads
    num_heads: int
    num_layers: int  # of each head
    hidden_size: int
    has_bias: bool
    has_own_heads: bool  # False: one output head for all
    draft_vocab_size: int
    vocab_size: int  # of the target that it was trained for
    has_token_map: bool
    logit_scale: float  # on the output of heads of their own

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> MedusaSpec:
        """Read the tensors' names and shapes. Raises Refusal for a relative; CheckpointError: SD-E146, E171, E172."""
        refuse_relatives(checkpoint)
        names = _our_names(checkpoint.shapes)
        shapes = {ours: checkpoint.shapes[stored] for stored, ours in names.items()}
        layers = [_LAYER.fullmatch(name) for name in shapes]
        numbers = {(int(found[1]), int(found[2])) for found in layers if found}
        if not numbers:
            raise lacks(checkpoint, "blocks.0.layers.0.weight or 0.0.linear.weight: the first layer of a head")
        num_layers = 1 + max(layer for _, layer in numbers)
        _check_depth(checkpoint, names, num_layers)
        output = shapes.get("lm_heads.0.weight") or shapes.get("lm_head.weight")
        if output is None and not checkpoint.get("original_lm_head", bool, False):
            raise lacks(checkpoint, f"lm_heads.0.weight or 0.{num_layers}.weight: the first output head")
        vocab_size = checkpoint.get("vocab_size", int, target.vocab_size)
        return cls(
            names=names,
            num_heads=len({head for head, _ in numbers}),
            num_layers=num_layers,
            hidden_size=shapes.get("blocks.0.layers.0.weight", (0,))[0],
            has_bias="blocks.0.layers.0.bias" in shapes or checkpoint.get("medusa_fc_bias", bool, False),
            has_own_heads="lm_heads.0.weight" in shapes,
            draft_vocab_size=output[0] if output else vocab_size,
            vocab_size=vocab_size,
            has_token_map=TOKEN_MAP in shapes,
            logit_scale=checkpoint.logit_scale or 1.0,
        )

    def check_fits(self, target: TargetInfo) -> None:
        """Raise Refusal, with the numbers, if the heads are another target's."""
        require_target(target, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        whole = self.draft_vocab_size == target.vocab_size
        if self.draft_vocab_size > target.vocab_size or not (whole or self.has_token_map):
            sizes = f"{self.draft_vocab_size} outputs, the target's vocabulary {target.vocab_size} tokens"
            reason = f"the heads have {sizes}" + ("" if self.has_token_map else f", and there is no {TOKEN_MAP!r}")
            raise Refusal(reason, f"a checkpoint with a {TOKEN_MAP!r} tensor, or heads trained for this target")

    def stored_as(self, name: str) -> str:
        """The stored name of the tensor that we call `name`."""
        return next(stored for stored, ours in self.names.items() if ours == name)


def _our_names(stored: Mapping[str, object]) -> dict[str, str]:
    """Every tensor of the heads by its stored name. In a whole model's checkpoint they are those with a prefix."""
    prefixed = [name for name in stored if name.startswith(PREFIXES)]
    return {name: _our_name(name) for name in prefixed or stored}


def _our_name(stored: str) -> str:
    name = stored
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    if found := _LAYER.fullmatch(name):
        head, layer = found[1] or found[3], found[2] or found[4]
        return f"blocks.{head}.layers.{layer}.{found[5]}"
    if found := _HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name


def _check_depth(checkpoint: Checkpoint, names: Mapping[str, str], num_layers: int) -> None:
    """An output head named by its place behind the layers tells how many of them there should be."""
    for stored, ours in names.items():
        found = _HEAD.fullmatch(stored.removeprefix(PREFIXES[0]).removeprefix(PREFIXES[1]))
        if found and int(found[2]) != num_layers:
            missing = f"{found[1]}.{int(found[2]) - 1}.linear.weight: a layer before {stored} (ours: {ours})"
            raise lacks(checkpoint, missing)
