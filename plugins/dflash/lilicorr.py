"""LiLiCorr (NVIDIA): all candidates of a block see each other, then each is scored as the follower of another.

Letters: b requests, n drafts, k candidates of a slot, h width of the network, c of the reranker, f of its factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention, silu

from specdec.sdk import Refusal, StepView
from specdec.sdk.checkpoint import Checkpoint
from specdec.sdk.model_proposer import Drawing

from .checkpoint import DFlashSpec
from .fields import NUMBER, required
from .walk import Block, Walk, among

_NUM_FEATURES = 5
_COUNTS = ("candidate_topk", "hidden_size", "num_layers", "num_heads", "factor_dim")
_NUMBERS = ("mlp_ratio", "vector_eps", "logit_scale")


class Mlp(nn.Module):
    """Two linear layers with SiLU between."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.up_proj(states)))
        return out


class Attention(nn.Module):
    """Attention of all candidates to all, with a bias by the distance of their slots."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        """States [b, n*k, c]; bias [heads, n*k, n*k]."""
        projected = states @ self.in_proj_weight.T + self.in_proj_bias
        shape = *states.shape[:2], self._num_heads, -1
        q, k, v = (each.reshape(shape).transpose(1, 2) for each in projected.chunk(3, dim=-1))
        out: Tensor = self.out_proj(scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, num_heads: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(width, eps=eps), Attention(width, num_heads)
        self.mlp_norm, self.mlp = nn.RMSNorm(width, eps=eps), Mlp(width, inner, width)

    def forward(self, states: Tensor, bias: Tensor) -> Tensor:
        """States [b, n*k, c]; bias [heads, n*k, n*k]."""
        states = states + self.attn(self.attn_norm(states), bias)
        out: Tensor = states + self.mlp(self.mlp_norm(states))
        return out


class Reranker(nn.Module):
    """Vectors by which one candidate leads to another: the out-vector of the first, the in-vector of the second."""

    def __init__(self, spec: DFlashSpec, keys: Mapping[str, Any], biased: Mapping[str, bool]) -> None:
        super().__init__()
        self._block_size, self._eps = spec.block_size, float(keys["vector_eps"])
        width, k, factors = keys["hidden_size"] or spec.width, keys["candidate_topk"], keys["factor_dim"]
        heads, norm_eps = keys["num_heads"], spec.decoder["rms_norm_eps"]
        self.token_proj = nn.Identity() if width == spec.width else nn.Linear(spec.width, width)
        self.pass_hidden_proj, self.context_proj = nn.Linear(spec.width, width), nn.Linear(spec.width, width)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(_NUM_FEATURES), Mlp(_NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, spec.block_size - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, k, width))
        self.relative_slot_bias = nn.Parameter(torch.empty(heads, 2 * spec.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(heads))
        inner = int(width * keys["mlp_ratio"])
        self.layers = nn.ModuleList(Layer(width, heads, inner, norm_eps) for _ in range(keys["num_layers"]))
        self.output_norm, self.anchor_norm = nn.RMSNorm(width, eps=norm_eps), nn.RMSNorm(width, eps=norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factors, bias=biased["out_head"])
        self.in_head = nn.Linear(width, factors, bias=biased["in_head"])
        self.anchor_out_head = nn.Linear(width, factors, bias=biased["anchor_out_head"])

    def forward(self, embedded: Tensor, logs: Tensor, outputs: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """Unit vectors: the anchors' out [b, f], the candidates' out and in [b, n, k, f].

        embedded: the candidates' embeddings, [b, n, k, h].
        logs: their log-probabilities over the whole vocabulary, [b, n, k] float32, the largest first.
        outputs: the slots', [b, n, h].
        context: the context rows before the anchors, [b, h].
        """
        states = self.token_proj(embedded) + self.pass_hidden_proj(outputs)[:, :, None]
        states = states + self.feature_mlp(self.feature_norm(_features(logs).to(outputs.dtype)))
        num_slots, k = logs.shape[1:]
        states = states + self.slot_embedding[0, :, :num_slots] + self.rank_embedding[0]
        flat, bias = states.flatten(1, 2), self._bias(num_slots, k).to(states.dtype)
        for layer in self.layers:
            flat = layer(flat, bias)
        states = self.output_norm(flat).view_as(states)
        anchor = self.anchor_norm(self.context_proj(context))
        seen = anchor[:, None, None].expand_as(states)
        factors = silu(self.factor_input_proj(torch.cat([states, seen, states * seen], dim=-1)))
        vectors = self.anchor_out_head(anchor), self.out_head(factors), self.in_head(factors)
        return tuple(normalize(each.float(), dim=-1, eps=self._eps) for each in vectors)

    def _bias(self, num_slots: int, k: int) -> Tensor:
        """[heads, n*k, n*k]"""
        slots = torch.arange(num_slots, device=self.same_slot_bias.device).repeat_interleave(k)
        apart = slots[:, None] - slots
        bias = self.relative_slot_bias[:, apart + self._block_size - 1]
        return bias + (apart == 0) * self.same_slot_bias[:, None, None]


def _features(logs: Tensor) -> Tensor:
    """Features of each candidate [b, n, k, 5]: log-probability, probability, distance to the best, rank, whether it is
    best.
    """
    ranks = torch.arange(logs.shape[-1], device=logs.device, dtype=logs.dtype)
    of_rank = [ranks / max(len(ranks) - 1, 1), (ranks == 0).to(logs.dtype)]
    of_slot = [logs, logs.exp(), logs - logs.amax(-1, keepdim=True)]
    return torch.stack([*of_slot, *(each.expand_as(logs) for each in of_rank)], dim=-1)


class RerankedWalk(Walk):
    """Draws from left to right among the k most likely tokens of each slot. Their own logits do not count again."""

    def __init__(self, checkpoint: Checkpoint, spec: DFlashSpec) -> None:
        """Raises CheckpointError SD-E170, SD-E171; Refusal for an own vocabulary, or drafts of the anchor."""
        super().__init__()
        spec.refuse_own_vocabulary()
        if spec.drafts_from_anchor:
            reason = "sample_from_anchor is true, and its slots are those behind the anchor"
            raise Refusal(reason, '"sample_from_anchor": false')
        keys = {name: required(checkpoint, f"lilicorr_{name}", int) for name in _COUNTS}
        keys |= {name: required(checkpoint, f"lilicorr_{name}", NUMBER) for name in _NUMBERS}
        heads = ("out_head", "in_head", "anchor_out_head")
        self._num_candidates, self._scale = keys["candidate_topk"], float(keys["logit_scale"])
        self.lilicorr = Reranker(spec, keys, {name: f"lilicorr.{name}.bias" in checkpoint.shapes for name in heads})

    def sees(self, step: StepView) -> tuple[Tensor, ...]:
        """The target's hidden states at the last position before the anchors."""
        return (step.kept.hidden_cat(step.kept.last),)

    def draw(self, drawing: Drawing, block: Block) -> None:
        """Draw the block. All slots are candidates of each other, whatever the number of tokens."""
        logs, ids = block.all_logits.float().log_softmax(-1).topk(self._num_candidates)
        outputs = block.outputs[:, block.first_slot :]
        previous, leaving, entering = self.lilicorr(block.embed(ids), logs, outputs, block.project(*block.seen))
        for index in range(block.num_tokens):
            scores = self._scale * (entering[:, index] @ previous[:, :, None])[:, :, 0]
            drawn = drawing.draw(among(ids[:, index], scores, block.all_logits.shape[-1]))
            rank = (ids[:, index] == drawn[:, None]).int().argmax(-1)
            previous = leaving[torch.arange(len(rank), device=rank.device), index, rank]
