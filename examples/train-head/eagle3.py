"""An EAGLE-3 head with its training-time test (https://arxiv.org/abs/2503.01840)."""

import torch
from layers import MLP, Attention, RMSNorm, frozen
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

Memory = list[tuple[Tensor, Tensor]]  # keys and values of each depth so far


class Layer(nn.Module):
    """One decoder layer on [embedding; state]."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden, eps = sizes["hidden_size"], sizes["rms_norm_eps"]
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn, self.mlp = Attention(sizes, 2 * hidden), MLP(sizes)

    def forward(self, embedded: Tensor, states: Tensor, depth: int, memory: Memory) -> Tensor:
        residual = self.hidden_norm(states)
        pair = torch.cat([self.input_layernorm(embedded), residual], dim=-1)
        positions = depth + torch.arange(pair.shape[1])
        memory.append(self.self_attn.keys_and_values(pair, positions))
        x = residual + self.self_attn.o_proj(attend(self.self_attn.queries(pair, positions), memory))
        return x + self.mlp(self.post_attention_layernorm(x))


def attend(q: Tensor, memory: Memory) -> Tensor:
    """Row t of depth d sees rows 0..t of depth 0, which have the target's states, and row t of depths 1..d."""
    keys, values = memory[0]
    if len(memory) == 1:
        heads = scaled_dot_product_attention(q, keys, values, is_causal=True)
    else:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        of_text = (q @ keys.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        own = torch.stack([(q * later).sum(-1) for later, _ in memory[1:]], dim=-1)
        weights = (torch.cat([of_text, own], dim=-1) * q.shape[-1] ** -0.5).softmax(-1)
        heads = weights[..., : q.shape[2]] @ values
        for depth, (_, later) in enumerate(memory[1:]):
            heads = heads + weights[..., q.shape[2] + depth, None] * later
    return heads.transpose(1, 2).flatten(2)


class Eagle3(nn.Module):
    """Drafts one token after another, each from its own state of the one before."""

    layers_field = "eagle_aux_hidden_state_layer_ids"
    num_layers, model_type, depths = 1, "llama", 4  # depths: draft steps that are trained at once

    def __init__(self, target: nn.Module, num_layers_read: int, sizes: dict) -> None:
        super().__init__()
        hidden = sizes["hidden_size"]
        self.embed_tokens = nn.Embedding(sizes["vocab_size"], hidden)
        self.embed_tokens.weight = frozen(target.get_input_embeddings().weight)
        self.fc = nn.Linear(num_layers_read * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(sizes)])
        self.norm = RMSNorm(hidden, sizes["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, sizes["vocab_size"], bias=False)
        self.lm_head.weight = frozen(target.get_output_embeddings().weight)

    def rows(self, length: int) -> Tensor:
        """Where drafts begin in texts of a length: at every token, because all rows are computed at once."""
        return torch.arange(length)

    def forward(self, ids: Tensor, read: Tensor, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, V] of each depth. Row t drafts from the target's states up to t and the token after it."""
        states, memory, logits = self.fc(read), [], []
        for depth in range(self.depths):
            tokens = pad(ids[:, 1 + depth :], (0, 1 + depth))
            states = self.layers[0](self.embed_tokens(tokens), states, depth, memory)
            logits.append(self.lm_head(self.norm(states[:, rows])))
        return logits

    def config(self) -> dict:
        """What config.json says beside what all heads have."""
        return {"architectures": ["Eagle3DraftModel"], "norm_before_residual": True}

    def tensors(self) -> dict[str, Tensor]:
        """What model.safetensors holds: the whole vocabulary, and the map that says so."""
        size = len(self.embed_tokens.weight)
        maps = {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
        return {name: each.to(torch.bfloat16) for name, each in self.state_dict().items()} | maps
