"""A block of masks that is filled in at once (DFlash, arXiv 2602.06036), over KV made of the target's hidden states."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specdec.sdk import Needs, ProposerConfig, StepView, TargetInfo
from specdec.sdk.model_proposer import ParallelProposer, TargetHead, draft_kv_of, load_module, rotate


class Block(nn.Module):
    """Layers of transformers. Its parts have the checkpoint's names."""

    def __init__(self, decoder: Any, num_states: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_states * width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=1e-6)
        self.layers, self.norm, self.rotary = decoder.layers, decoder.norm, decoder.rotary_emb

    def context(self, hidden: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [N, heads, head_dim] of each layer, of hidden states [N, L*H]."""
        rows = self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))
        rotary = self.rotary(rows[None], positions[None])
        for attention in (layer.self_attn for layer in self.layers):
            split = (-1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(rows).unflatten(-1, split))
            yield rotate(keys, rotary), attention.v_proj(rows).unflatten(-1, split)

    def forward(self, embedded: Tensor, positions: Tensor, attention: Mapping[str, Any]) -> Tensor:
        """States [b, W, H] of blocks [b, W, H] at positions [b, W]."""
        states = embedded.flatten(0, 1)[None]
        rotary = self.rotary(states, positions.flatten()[None])
        for layer in self.layers:
            states = layer(states, attention_mask=None, position_embeddings=rotary, **attention)
        return self.norm(states).view_as(embedded)


class DiffusionBlock(ParallelProposer):
    """The newest token and masks behind it, in one pass."""

    default_model = "tiny/dflash"

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """The hidden states that the checkpoint names, and KV for them and for a block."""
        checkpoint = cls.open_checkpoint(config)
        layers, width = checkpoint.get("transformer_layer_config", dict), checkpoint.get("block_size", int)
        kv = draft_kv_of(layers, num_layers=layers["num_hidden_layers"], lookahead=width, dtype=config.network.dtype)
        states = tuple(checkpoint.get("aux_hidden_state_layer_ids", list))
        return cls.shared_needs(config, target, kv, hidden_states=states, max_draft_tokens=width - 1)

    def build(self) -> None:
        """The block's network; embedding and output are the target's."""
        checkpoint = self.open_checkpoint(self.config)
        decoder = self.services.build_decoder(checkpoint.get("transformer_layer_config", dict), self.settings)
        num_states = len(checkpoint.get("aux_hidden_state_layer_ids", list))
        self.network = Block(decoder, num_states, self.target.hidden_size)
        load_module(self.network, self.services.load_tensors(checkpoint.directory), checkpoint.directory)
        self.services.finish(self.network, self.settings)
        self.output, self.mask_id = TargetHead(self.services), checkpoint.get("mask_token_id", int)
        self.slots = torch.arange(checkpoint.get("block_size", int), device=self.services.device)

    @torch.inference_mode()
    def observe(self, step: StepView) -> None:
        """Keys and values of what the step committed."""
        entries, owners = step.kept.entries()
        places = step.slots[owners], step.kept.positions[entries]
        for layer, (keys, values) in enumerate(self.network.context(step.kept.hidden_cat(entries), places[1])):
            self.services.draft_kv().write(layer, *places, keys, values)

    def block_inputs(self, step: StepView) -> tuple[Tensor, ...]:
        """Where each block goes, and its first token."""
        return step.slots, step.kept.next_position, step.newest_token

    def block_logits(self, num_tokens: int, *inputs: Tensor) -> Tensor:
        """Always a whole block: the network was trained with its width."""
        slots, starts, newest = inputs
        bounds = torch.arange(len(slots) + 1, device=slots.device) * len(self.slots)
        attention = self.services.draft_kv().attention(slots, starts, bounds, "full_block")
        embedded = self.services.embed(torch.where(self.slots == 0, newest[:, None], self.mask_id))
        embedded = embedded.to(self.network.fc.weight.dtype)
        states = self.network(embedded, starts[:, None] + self.slots, attention)
        return self.output(states[:, 1 : 1 + num_tokens])
