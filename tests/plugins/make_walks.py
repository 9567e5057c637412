"""Checkpoints of DFlash2, Domino, XPress and LiLiCorr with random weights, and what each drafts in plain torch.

A replay is written from the published format alone, one token at a time. Nothing of it is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import make_dflash
import torch
from make_dflash import BLOCK, H, Made, V, speculators_reduced
from torch import Tensor
from torch.nn.functional import linear
from walk_replay import RANK, Walked, WalkReplay, small

# DFlash2

GROUP, TOP_K = 16, 4


def convolution_tensors(taps: int, *, identity: bool, seed: int = 21) -> dict[str, Tensor]:
    tensors = {}
    for index, name in enumerate(f"layers.{layer}.{each}_conv" for layer in (0, 1) for each in ("attention", "mlp")):
        base = torch.zeros(2, taps, H)
        base[:, 0] = 1
        if not identity:
            base += small(2, taps, H, seed=seed + index, size=0.3)
        added = small(2 * taps * H // GROUP, H, seed=seed + 10 + index, size=0.0 if identity else 0.01)
        tensors |= {f"{name}.base_kernel": base, f"{name}.kernel_projection.weight": added}
    return tensors


def dflash2(path: Path, *, identity: bool = False, taps: int = 2, base: Made | None = None) -> Made:
    """z-lab: convolutions around every sublayer, and a selector among the best tokens of each slot."""
    made = make_dflash.z_lab(path) if base is None else base
    made.path = path
    made.config["architectures"] = ["DFlash2DraftModel"]
    made.config.setdefault("dflash_config", {})
    made.config["dflash_config"] |= {
        "conv_kernel_size": taps,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    }
    size = 0.0 if identity else 0.7
    made.tensors |= convolution_tensors(taps, identity=identity) | {
        "candidate_selector.predecessor_codebook": small(V, RANK, seed=31, size=size),
        "candidate_selector.successor_codebook": small(V, RANK, seed=32, size=size),
        "candidate_selector.hidden_projection.weight": small(RANK, H, seed=33, size=0.1),
    }
    return made


def dflash2_with_factors(path: Path) -> Made:
    """Raw embeddings times a factor, logits scaled and capped, windows that see both ways, three taps."""
    made = dflash2(path, taps=3)
    made.config["dflash_config"] |= {
        "input_embedding_scale": 3.0,
        "output_multiplier": 0.5,
        "final_logit_softcapping": 2.0,
    }
    made.config |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
    made.windows = (9, 9)
    return made


class DFlash2Replay(WalkReplay):
    """The selector's walk, over a network whose sublayers stand between convolutions."""

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        return super().embed(tokens) * self.made.config["dflash_config"].get("input_embedding_scale", 1.0)

    def head(self, outputs: Tensor) -> Tensor:
        fields = self.made.config["dflash_config"]
        logits = super().head(outputs) * fields.get("output_multiplier", 1.0)
        cap = fields.get("final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def sublayer(self, layer: int, name: str, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        name = {"self_attn": "attention", "mlp": "mlp"}[name]
        base = self.t[f"layers.{layer}.{name}_conv.base_kernel"]
        taps = base.shape[1]
        added = inputs @ self.t[f"layers.{layer}.{name}_conv.kernel_projection.weight"].T

        def conv(side: int, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for i in range(len(x)):
                delta = added[i].reshape(2, taps, H // GROUP)
                for tap in range(min(taps, i + 1)):
                    for group in range(H // GROUP):
                        c = slice(group * GROUP, (group + 1) * GROUP)
                        out[i, c] += (base[side, tap, c] + delta[side, tap, group]) * x[i - tap, c]
            return out

        return conv(1, run(conv(0, inputs)))

    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        t = self.t
        out = self.outputs(tokens, length, k, length - 1)[self.made.first_slot :]
        walked, rows, previous = Walked([], torch.empty(0)), [], tokens[length - 1]
        for unary, state in zip(self.head(out), out, strict=True):
            best = unary.sort(descending=True, stable=True).indices[:TOP_K]
            projected = t["candidate_selector.hidden_projection.weight"] @ state
            pair = t["candidate_selector.predecessor_codebook"][previous] * projected
            rows.append(torch.full((V,), -torch.inf))
            for candidate in best.tolist():
                bonus = pair @ t["candidate_selector.successor_codebook"][candidate]
                rows[-1][candidate] = unary[candidate] + bonus
            previous = self.chosen(rows[-1], given, len(walked.ids))
            walked.ids.append(previous)
        walked.logits = torch.stack(rows)
        return walked


# Domino

STATE, INNER = 12, 10


def domino(path: Path, *, shift: bool = True, num_pure: int = 1, base: Made | None = None, size: float = 1.0) -> Made:
    made = make_dflash.z_lab(path) if base is None else base
    made.path, made.first_slot = path, 0 if shift else 1
    made.config.setdefault("dflash_config", {})
    made.config["dflash_config"] |= {
        "projector_type": "domino",
        "gru_hidden_dim": STATE,
        "emb_dim": INNER,
        "pure_draft_prefix_len": num_pure,
        "shift_label": shift,
    }
    made.tensors |= {
        "prefix_gru.weight_ih_l0": small(3 * STATE, H, seed=41, size=1.0),
        "prefix_gru.weight_hh_l0": small(3 * STATE, STATE, seed=42),
        "embed_proj.0.weight": small(INNER, H + STATE, seed=43, size=0.3),
        "embed_proj.2.weight": small(V, INNER, seed=44, size=size),
    }
    return made


class DominoReplay(WalkReplay):
    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        t, fields = self.t, self.made.config["dflash_config"]
        out = self.outputs(tokens, length, k, length - 1)[self.made.first_slot :]
        gru = torch.nn.GRU(H, STATE, bias=False)
        gru.load_state_dict({name: t[f"prefix_gru.{name}"] for name in gru.state_dict()})
        walked, rows = Walked([], torch.empty(0)), []
        for index, (base, state) in enumerate(zip(self.head(out), out, strict=True)):
            logits = base
            if index >= fields["pure_draft_prefix_len"]:
                _, memory = gru(self.embed([tokens[length - 1], *walked.ids]))  # all of them again
                inner = t["embed_proj.0.weight"] @ torch.cat([state, memory[0]])
                logits = base + t["embed_proj.2.weight"] @ torch.nn.functional.silu(inner)
            rows.append(logits)
            walked.ids.append(self.chosen(logits, given, index))
        walked.logits = torch.stack(rows)
        return walked


# XPress


def xpress(
    path: Path, *, from_anchor: bool = False, passes: int = 3, base: Made | None = None, size: float = 1.5
) -> Made:
    made = speculators_reduced(path) if base is None else base
    made.path, made.first_slot = path, 0 if from_anchor else 1
    made.config |= {
        "architectures": ["XPressDraftModel"],
        "speculators_model_type": "xpress",
        "sample_from_anchor": from_anchor,
        "xpress_rank": RANK,
        "xpress_mlp_ratio": 2,
        "num_jacobi_passes": passes,
    }
    made.config["speculators_config"] = made.config["speculators_config"] | {"algorithm": "xpress"}
    block, num_ids = made.block_size, made.config["draft_vocab_size"]
    made.tensors |= {
        "refiner_head.token_embed.weight": small(V, RANK, seed=51),
        "refiner_head.down_h.weight": small(RANK, H, seed=52, size=0.1),
        "refiner_head.down_g.weight": small(RANK, H, seed=53, size=0.1),
        "refiner_head.in_proj.weight": small(RANK, 3 * RANK, seed=54, size=0.3),
        "refiner_head.mix_l": small(RANK, block, block, seed=55, size=0.3),
        "refiner_head.mlp_gate.weight": small(2 * RANK, RANK, seed=56, size=0.3),
        "refiner_head.mlp_up.weight": small(2 * RANK, RANK, seed=57, size=0.3),
        "refiner_head.mlp_down.weight": small(RANK, 2 * RANK, seed=58, size=0.3),
        "refiner_head.readout.weight": small(num_ids, RANK, seed=59, size=size),
    }
    return made


class XPressReplay(WalkReplay):
    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        r = {name.removeprefix("refiner_head."): each for name, each in self.t.items() if "refiner_head" in name}
        first = self.made.first_slot
        out = self.outputs(tokens, length, k, length - 1)
        base, mean = self.head(out), out.mean(0)
        guess = [self.chosen(row, (), 0) for row in base]
        for _ in range(self.made.config["num_jacobi_passes"]):
            if first:
                guess[0] = tokens[length - 1]
            previous = [tokens[length - 2] if first else tokens[length - 1], *guess[:-1]]
            features = [
                torch.cat([r["down_h.weight"] @ o, r["down_g.weight"] @ mean, r["token_embed.weight"][p]])
                for o, p in zip(out, previous, strict=True)
            ]
            x = [r["in_proj.weight"] @ each for each in features]
            mixed = []
            for j, each in enumerate(x):
                mixed.append(each + sum(r["mix_l"][:, j, i] * x[i] for i in range(j + 1)))
            refined = []
            for each in mixed:
                gate = torch.nn.functional.silu(r["mlp_gate.weight"] @ each)
                refined.append(each + r["mlp_down.weight"] @ (gate * (r["mlp_up.weight"] @ each)))
            logits = base + torch.stack([r["readout.weight"] @ each for each in refined])
            guess = [self.chosen(row, (), 0) for row in logits]
        return Walked(guess[first:], logits[first:])


# LiLiCorr

INNER_WIDTH, FACTORS, HEADS, LAYERS = 16, 8, 2, 1


def lilicorr(path: Path, *, convolved: bool = False, head_biases: bool = True) -> Made:
    made = make_dflash.z_lab(path)
    made.config["architectures"] = ["LiLiCorrDraftModel"]
    made.config["dflash_config"] |= {
        "lilicorr_candidate_topk": TOP_K,
        "lilicorr_hidden_size": INNER_WIDTH,
        "lilicorr_num_layers": LAYERS,
        "lilicorr_num_heads": HEADS,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_factor_dim": FACTORS,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10,
    }
    c, layer = INNER_WIDTH, "lilicorr.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "lilicorr.slot_embedding": (1, 1, BLOCK - 1, 1, c),
        "lilicorr.rank_embedding": (1, 1, 1, TOP_K, c),
        "lilicorr.relative_slot_bias": (HEADS, 2 * BLOCK - 1),
        "lilicorr.same_slot_bias": (HEADS,),
        f"{layer}attn.in_proj_weight": (3 * c, c),
        f"{layer}attn.in_proj_bias": (3 * c,),
    }
    linear_layers = {
        "token_proj": (c, H),
        "pass_hidden_proj": (c, H),
        "context_proj": (c, H),
        "feature_mlp.up_proj": (c, 5),
        "feature_mlp.down_proj": (c, c),
        "factor_input_proj": (c, 3 * c),
        "layers.0.attn.out_proj": (c, c),
        "layers.0.mlp.up_proj": (2 * c, c),
        "layers.0.mlp.down_proj": (c, 2 * c),
    }
    heads = dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (FACTORS, c))
    for name, shape in (linear_layers | heads).items():
        shapes[f"lilicorr.{name}.weight"] = shape
        if name not in heads or head_biases:
            shapes[f"lilicorr.{name}.bias"] = shape[:1]
    for index, (name, shape) in enumerate(shapes.items()):
        made.tensors[name] = small(*shape, seed=70 + index, size=1.0 if len(shape) == 1 else 2 * shape[-1] ** -0.5)
    for index, name in enumerate(["layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"]):
        made.tensors[f"lilicorr.{name}.weight"] = 1 + small(c, seed=90 + index, size=0.2)
    made.tensors["lilicorr.feature_norm.weight"] = 1 + small(5, seed=95, size=0.2)
    made.tensors["lilicorr.feature_norm.bias"] = small(5, seed=96, size=0.2)
    if convolved:
        made.config["dflash_config"] |= {"conv_kernel_size": 2, "conv_group_size": GROUP}
        made.tensors |= convolution_tensors(2, identity=False)
    return made


class LiLiCorrReplay(DFlash2Replay):
    def sublayer(self, layer: int, name: str, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        convolved = "layers.0.mlp_conv.base_kernel" in self.t
        return super().sublayer(layer, name, inputs, run) if convolved else run(inputs)

    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        out = self.outputs(tokens, length, k, length - 1)[1:]
        logs, ids = self.head(out).log_softmax(-1).sort(descending=True, stable=True)
        logs, ids = logs[:, :TOP_K], ids[:, :TOP_K]
        x = torch.stack([self.candidate(out[s], s, c, logs[s], int(ids[s, c])) for s in range(k) for c in range(TOP_K)])
        slots = [s for s in range(k) for _ in range(TOP_K)]
        x = self.rms_of(self.attended(x, slots), "output_norm")
        anchor = self.rms_of(self.linear(self.context(tokens, length - 1)[-1], "context_proj"), "anchor_norm")
        factors = torch.nn.functional.silu(
            self.linear(torch.cat([x, anchor.expand_as(x), x * anchor], dim=-1), "factor_input_proj")
        )
        leaving, entering = (unit(self.linear(factors, name)) for name in ("out_head", "in_head"))
        previous = unit(self.linear(anchor, "anchor_out_head"))
        walked, rows = Walked([], torch.empty(0)), []
        for s in range(k):
            rows.append(torch.full((V,), -torch.inf))
            rows[-1][ids[s]] = 10 * (entering[s * TOP_K : (s + 1) * TOP_K] @ previous)
            walked.ids.append(self.chosen(rows[-1], given, s))
            previous = leaving[s * TOP_K + ids[s].tolist().index(walked.ids[-1])]
        walked.logits = torch.stack(rows)
        return walked

    def candidate(self, out: Tensor, slot: int, rank: int, logs: Tensor, token: int) -> Tensor:
        t = self.t
        features = torch.stack(
            [
                logs[rank],
                logs[rank].exp(),
                logs[rank] - logs[0],
                torch.tensor(rank / (TOP_K - 1)),
                torch.tensor(rank == 0),
            ]
        )
        normed = torch.nn.functional.layer_norm(
            features, (5,), t["lilicorr.feature_norm.weight"], t["lilicorr.feature_norm.bias"]
        )
        hidden = torch.nn.functional.silu(self.linear(normed, "feature_mlp.up_proj"))
        x = self.linear(self.embed([token])[0], "token_proj") + self.linear(out, "pass_hidden_proj")
        x = x + self.linear(hidden, "feature_mlp.down_proj")
        return x + t["lilicorr.slot_embedding"][0, 0, slot, 0] + t["lilicorr.rank_embedding"][0, 0, 0, rank]

    def attended(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        t, width = self.t, INNER_WIDTH // HEADS
        s = self.rms_of(x, "layers.0.attn_norm")
        projected = linear(s, t["lilicorr.layers.0.attn.in_proj_weight"], t["lilicorr.layers.0.attn.in_proj_bias"])
        q, k, v = projected.split(INNER_WIDTH, dim=-1)
        heads = []
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            scores = q[:, part] @ k[:, part].T * width**-0.5
            for a, slot_a in enumerate(slots):
                for b, slot_b in enumerate(slots):
                    scores[a, b] += t["lilicorr.relative_slot_bias"][head, slot_a - slot_b + BLOCK - 1]
                    if slot_a == slot_b:
                        scores[a, b] += t["lilicorr.same_slot_bias"][head]
            heads.append(scores.softmax(-1) @ v[:, part])
        x = x + self.linear(torch.cat(heads, dim=-1), "layers.0.attn.out_proj")
        s = self.rms_of(x, "layers.0.mlp_norm")
        hidden = torch.nn.functional.silu(self.linear(s, "layers.0.mlp.up_proj"))
        return x + self.linear(hidden, "layers.0.mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.t[f"lilicorr.{name}.weight"], self.t.get(f"lilicorr.{name}.bias"))

    def rms_of(self, x: Tensor, name: str) -> Tensor:
        return make_dflash.rms(x, self.t[f"lilicorr.{name}.weight"])


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)
