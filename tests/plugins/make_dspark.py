"""DSpark checkpoints with random weights, and what each drafts, once more in plain torch.

The replay is written from the published format alone, one token at a time. Nothing of it is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import make_dflash
import torch
from make_dflash import BLOCK, MASK_ID, H, Made, N, V, speculators_reduced, trained
from torch import Tensor
from torch.nn.functional import linear
from walk_replay import RANK, Walked, WalkReplay, small


def markov_tensors(kind: str, num_ids: int, *, confidence: str, seed: int = 11) -> dict[str, Tensor]:
    """`confidence`: "none", "outputs" or "tokens" (outputs and tokens)."""
    tensors = {
        "markov_head.markov_w1.weight": small(V, RANK, seed=seed),
        "markov_head.markov_w2.weight": small(num_ids, RANK, seed=seed + 1, size=0.6),
    }
    if kind == "gated":
        tensors["markov_head.gate_proj.weight"] = small(RANK, H + RANK, seed=seed + 2, size=0.2)
        tensors["markov_head.gate_proj.bias"] = small(RANK, seed=seed + 3)
    if kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = small(3 * RANK, 2 * RANK + H, seed=seed + 2, size=0.2)
        tensors["markov_head.joint_proj.bias"] = small(3 * RANK, seed=seed + 3)
    if confidence != "none":
        width = H + RANK * (confidence == "tokens")
        tensors["confidence_head.proj.weight"] = small(1, width, seed=seed + 4, size=0.1)
        tensors["confidence_head.proj.bias"] = small(1, seed=seed + 5)
    return tensors


def markov_fields(kind: str, confidence: str) -> dict[str, Any]:
    return {
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": confidence != "none",
        "confidence_head_with_markov": confidence == "tokens",
    }


def deepspec(path: Path, kind: str = "vanilla", confidence: str = "tokens") -> Made:
    """DeepSpec: a flat configuration, ids of layer outputs; the anchor's slot drafts."""
    config = make_dflash.layer_fields() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK,
        "mask_token_id": MASK_ID,
        "target_layer_ids": [1, 3, 4],
        "num_target_layers": N,
        "num_anchors": 512,
        "rope_theta": 10_000,
        **markov_fields(kind, confidence),
    }
    tensors = make_dflash.random_tensors() | markov_tensors(kind, V, confidence=confidence)
    return Made(path, first_slot=0, config=config, tensors=tensors)


def dspark_of_speculators(
    path: Path, *, from_anchor: bool, kind: str = "vanilla", confidence: str = "tokens", base: Made | None = None
) -> Made:
    """speculators: layers nested, ids of boundaries, the layout stated, and a draft vocabulary of its own."""
    made = speculators_reduced(path) if base is None else base
    num_ids = made.config["draft_vocab_size"]
    made.path, made.first_slot = path, 0 if from_anchor else 1
    made.config |= {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "sample_from_anchor": from_anchor,
        **markov_fields(kind, confidence),
    }
    made.config["speculators_config"] = made.config["speculators_config"] | {"algorithm": "dspark"}
    made.tensors |= markov_tensors(kind, num_ids, confidence=confidence)
    return made


def dspark_over_trained(path: Path, kind: str = "vanilla") -> Made:
    """The packaged DFlash with a Markov head that is random and weak: some drafts are accepted."""
    made = dspark_of_speculators(path, from_anchor=False, kind=kind, base=trained())
    made.tensors["markov_head.markov_w2.weight"] *= 0.5
    return made


class DSparkReplay(WalkReplay):
    @torch.no_grad()
    def walked(self, tokens: Sequence[int], length: int, k: int, given: Sequence[int] = ()) -> Walked:
        t, kind = self.t, self.made.config["markov_head_type"]
        out = self.outputs(tokens, length, k, length - 1)
        w1, w2 = t["markov_head.markov_w1.weight"], t["markov_head.markov_w2.weight"]
        anchor = tokens[length - 1]
        state = torch.zeros(w1.shape[1])
        walked = Walked([], torch.empty(0))
        rows = []
        # p_j of slot j: slot 0 reads the anchor; one that is not used reads it too, and so does the slot behind it
        previous = [anchor] if self.made.first_slot == 0 else [anchor, anchor]
        for slot in range(len(out)):
            embedded = w1[previous[slot]]
            if kind == "vanilla":
                bias = w2 @ embedded
            elif kind == "gated":
                gate = linear(
                    torch.cat([out[slot], embedded]), t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]
                )
                bias = w2 @ (torch.sigmoid(gate) * embedded)
            else:
                joint = linear(
                    torch.cat([state, embedded, out[slot]]),
                    t["markov_head.joint_proj.weight"],
                    t["markov_head.joint_proj.bias"],
                )
                u, c, o = joint.split(w1.shape[1])
                state = torch.sigmoid(u) * state + (1 - torch.sigmoid(u)) * torch.tanh(c)
                bias = w2 @ torch.tanh(o)
            if slot < self.made.first_slot:
                continue
            rows.append(self.head(out[slot][None])[0] + bias)
            walked.ids.append(self.chosen(rows[-1], given, len(walked.ids)))
            previous.append(walked.ids[-1])
        walked.logits = torch.stack(rows)
        return walked
