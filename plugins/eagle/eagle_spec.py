"""An EAGLE-1 checkpoint's configuration, in its authors' layout or vLLM's wrapped one, as one specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.sdk import Refusal, TargetInfo
from specdec.sdk.checkpoint import Checkpoint, require_target
from specdec.sdk.model_proposer.kv_shape import require_positions

from .decoder_config import decoder_config, is_latent
from .names import count_layers, our_shapes
from .recognise import is_eagle3
from .variants import refuse_variants


@dataclass(frozen=True, kw_only=True)
class EagleSpec:
    """What the network is."""

    decoder: Mapping[str, Any]  # the draft layers' configuration under transformers' names
    hidden_size: int
    embedding_size: int
    vocab_size: int
    has_fc_bias: bool

    @classmethod
    def read(cls, checkpoint: Checkpoint, target: TargetInfo) -> EagleSpec:
        """Read config.json and the tensors' shapes. Raises Refusal; CheckpointError SD-E146, SD-E170 .. SD-E174."""
        if is_eagle3(checkpoint):
            raise Refusal("this is an EAGLE-3 checkpoint", '"method": "eagle3"')
        prefix = "model." if isinstance(checkpoint.config.get("model"), Mapping) else ""
        if is_latent(checkpoint, prefix):
            raise Refusal(
                "EAGLE-1 with multi-head latent attention (kv_lora_rank) is not implemented", "an EAGLE-3 head"
            )
        shapes = our_shapes(checkpoint)
        refuse_variants(checkpoint, shapes, prefix)
        decoder = decoder_config(checkpoint, prefix, count_layers(shapes, checkpoint), shapes)
        vocab_size = checkpoint.get(prefix + "vocab_size", int)
        truncated = checkpoint.get("truncated_vocab_size", int, vocab_size)
        if truncated != vocab_size:
            reason = f"its truncated_vocab_size is {truncated} of {vocab_size}, which is not implemented"
            raise Refusal(reason, "a head for the whole vocabulary")
        table = shapes.get("embed_tokens.weight", ())
        return cls(
            decoder=decoder,
            hidden_size=decoder["hidden_size"],
            embedding_size=table[1] if len(table) == 2 else target.hidden_size,
            vocab_size=vocab_size,
            has_fc_bias=checkpoint.get(prefix + "bias", bool, "fc.bias" in shapes),
        )

    def check_fits(self, target: TargetInfo) -> None:
        """Raise Refusal, with the numbers, if the checkpoint was made for another target."""
        require_target(target, hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        require_positions(self.decoder, target)
