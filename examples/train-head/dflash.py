"""A DFlash head (https://arxiv.org/abs/2602.06036): all tokens of a draft are filled in by one pass."""

import torch
from layers import MLP, Attention, RMSNorm, frozen
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

BLOCK = 8  # slots: the newest token and the masks after it
ROWS = 48  # blocks of a text in one step of training


class Layer(nn.Module):
    """A pre-norm decoder layer, whose slots see the context and each other."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.self_attn, self.mlp = Attention(sizes, hidden), MLP(sizes)
        self.self_attn.q_norm, self.self_attn.k_norm = (RMSNorm(sizes["head_dim"], eps) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, context: Tensor, visible: Tensor) -> Tensor:
        normed, attention = self.input_layernorm(x), self.self_attn
        of_context = attention.keys_and_values(context, torch.arange(context.shape[1]))
        own = attention.keys_and_values(normed, positions)
        k, v = (torch.cat(pair, dim=2) for pair in zip(of_context, own, strict=True))
        heads = scaled_dot_product_attention(attention.queries(normed, positions), k, v, attn_mask=visible)
        x = x + attention.o_proj(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlash(nn.Module):
    """Reads the target's states as its context. Embedding and output head are the target's."""

    layers_field = "aux_hidden_state_layer_ids"
    num_layers, model_type, depths = 2, "qwen3", BLOCK - 1

    def __init__(self, target: nn.Module, num_layers_read: int, sizes: dict) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        self.embedding, self.unembedding = (
            frozen(each.weight) for each in (target.get_input_embeddings(), target.get_output_embeddings())
        )
        self.mask_token_id = sizes["mask_token_id"]
        self.fc = nn.Linear(num_layers_read * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = (RMSNorm(hidden, sizes["rms_norm_eps"]) for _ in range(2))
        self.layers = nn.ModuleList([Layer(sizes) for _ in range(self.num_layers)])

    def rows(self, length: int) -> Tensor:
        """Where drafts begin in texts of a length: at some places, because each is a block of its own."""
        return torch.randperm(length - 1)[:ROWS]

    def forward(self, ids: Tensor, read: Tensor, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, V] of each depth. Row t drafts from the target's states up to t and the token after it."""
        context = self.hidden_norm(self.fc(read))
        slots = torch.full((*ids[:, rows].shape, BLOCK), self.mask_token_id)
        slots[:, :, 0] = ids[:, (rows + 1).clamp(max=ids.shape[1] - 1)]
        positions = (rows[:, None] + 1 + torch.arange(BLOCK)).flatten()
        x, visible = embedding(slots.flatten(1), self.embedding), seen(rows, ids.shape[1])
        for layer in self.layers:
            x = layer(x, positions, context, visible)
        drafts = self.norm(x).unflatten(1, (-1, BLOCK))[:, :, 1:]
        return list(linear(drafts, self.unembedding).unbind(2))

    def config(self) -> dict:
        """What config.json says beside what all heads have."""
        block = {"block_size": BLOCK, "mask_token_id": self.mask_token_id, "sample_from_anchor": False}
        return {"architectures": ["DFlashDraftModel"]} | block

    def tensors(self) -> dict[str, Tensor]:
        """What model.safetensors holds: only what is trained."""
        trained = {name for name, each in self.named_parameters() if each.requires_grad}
        return {name: each.to(torch.bfloat16) for name, each in self.state_dict().items() if name in trained}


def seen(rows: Tensor, length: int) -> Tensor:
    """[R * BLOCK, length + R * BLOCK]: a slot of row t sees the context up to t and all slots of its own block."""
    context = torch.arange(length) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool).repeat_interleave(BLOCK, dim=1)
    return torch.cat([context, own], dim=1).repeat_interleave(BLOCK, dim=0)
