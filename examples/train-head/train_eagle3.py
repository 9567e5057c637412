"""Train an EAGLE-3 head on exported data: plain torch, one process, no GPU needed.

    specdec record MODEL -o runs/train --hidden-states 2,4,5,8 ...    # 8: after the last of 8 layers
    specdec export-data runs/train -o data --format speculators
    python train_eagle3.py data heads/mine --target path/to/MODEL --layers 2,4,5

Method: EAGLE-3 with its training-time test, https://arxiv.org/abs/2503.01840. The checkpoint is one of `speculators`.
"""

import argparse
import json
import time
from pathlib import Path

import pyarrow as pa
import torch
from eagle3 import DEPTHS, Head
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax, pad
from transformers import AutoModelForCausalLM, PretrainedConfig

DECAY = 0.8  # of the loss, from one draft step to the next


def load_rows(folder: Path) -> list[tuple[Tensor, Tensor, Tensor]]:
    """input_ids [T], loss_mask [T], hidden_states [T, L, H] of each text."""
    with pa.memory_map(str(folder / "data-00000-of-00001.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    states = [load_file(folder / "hidden_states" / f"hs_{i}.safetensors")["hidden_states"] for i in range(len(rows))]
    return [(torch.tensor(r["input_ids"]), torch.tensor(r["loss_mask"]), s) for r, s in zip(rows, states, strict=True)]


def batches(rows: list, size: int, generator: torch.Generator) -> list[tuple[Tensor, ...]]:
    """ids, loss masks and states, padded with a loss mask of -1, of texts of like lengths."""
    ordered = sorted(rows, key=lambda row: len(row[0]))
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    shuffled = [groups[i] for i in torch.randperm(len(groups), generator=generator)]
    together = nn.utils.rnn.pad_sequence
    return [
        (
            together([row[0] for row in group], batch_first=True),
            together([row[1] for row in group], batch_first=True, padding_value=-1),
            together([row[2].float() for row in group], batch_first=True),
        )
        for group in shuffled
    ]


def loss_of(head: Head, target_logits: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    """Cross-entropy against the target's distributions. The prompt's rows count too: the target has read them."""
    ids, mask, states = batch
    losses = []
    for depth, logits in enumerate(head(ids, states[:, :, :-1].flatten(2))):
        first = 1 + depth  # row t drafts what the target says at t + 1 + depth
        entropy = -(target_logits[:, first:].softmax(-1) * log_softmax(logits[:, :-first], dim=-1)).sum(-1)
        losses.append(DECAY**depth * entropy[mask[:, first:] >= 0].mean())
    return torch.stack(losses).sum()


@torch.no_grad()
def agreement(head: Head, rows: list) -> list[float]:
    """For each depth: the share of drafts that are the text's next token, where all drafts before them are."""
    right, asked = torch.zeros(DEPTHS), torch.zeros(DEPTHS)
    for ids, mask, states in batches(rows, 16, torch.Generator()):
        alive = torch.ones_like(ids, dtype=torch.bool)
        for depth, logits in enumerate(head(ids, states[:, :, :-1].flatten(2))):
            known = pad(mask[:, 2 + depth :], (0, 2 + depth)) == 1
            text = pad(ids[:, 2 + depth :], (0, 2 + depth))
            asked[depth] += (alive & known).sum()
            alive &= known & (logits.argmax(-1) == text)
            right[depth] += alive.sum()
    return (right / asked.clamp(min=1)).tolist()


def write(head: Head, folder: Path, sizes: dict, arguments: argparse.Namespace) -> None:
    proposal = {"proposal_type": "greedy", "speculative_tokens": DEPTHS}
    verifier = {"name_or_path": str(arguments.target), "architectures": ["AutoModelForCausalLM"]}
    speculators = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": sizes["vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": arguments.layers,
        "tie_word_embeddings": False,
        "speculators_config": speculators | {"verifier": verifier},
        "transformer_layer_config": sizes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    tensors["d2t"] = torch.zeros(sizes["vocab_size"], dtype=torch.int64)
    tensors["t2d"] = torch.ones(sizes["vocab_size"], dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def sizes_of(config: PretrainedConfig) -> dict:
    """The head's layer: of the Llama type, as wide as the target's."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return {n: getattr(config, n) for n in names} | more | {"rope_parameters": rope, "max_position_embeddings": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--layers", type=lambda text: [int(each) for each in text.split(",")], required=True)
    parser.add_argument("--held-out", type=Path, help="exported data that is not trained on")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--steps", type=int, help="so many instead of minutes")
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).requires_grad_(False)
    sizes = sizes_of(target.config)
    head = Head(target, len(arguments.layers), sizes)
    trained = [each for each in head.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.01)
    rows, generator = load_rows(arguments.data), torch.Generator().manual_seed(0)
    start, step = time.monotonic(), 0

    def done() -> float:
        return step / arguments.steps if arguments.steps else (time.monotonic() - start) / (60 * arguments.minutes)

    while done() < 1:
        for batch in batches(rows, 8, generator):
            logits = target.lm_head(target.model.norm(batch[2][:, :, -1]))
            loss = loss_of(head, logits, batch)
            optimizer.param_groups[0]["lr"] = arguments.lr * min((step + 1) / 20, max(1 - done(), 0.02))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.3f}", flush=True)
            if done() >= 1:
                break
    write(head, arguments.out, sizes, arguments)
    found = {"train": agreement(head, rows[:64])}
    if arguments.held_out is not None:
        found["held_out"] = agreement(head, load_rows(arguments.held_out))
    (arguments.out / "agreement.json").write_text(json.dumps(found))
    print(f"{step} steps;", "; ".join(f"{name} {' '.join(f'{x:.2f}' for x in each)}" for name, each in found.items()))


if __name__ == "__main__":
    main()
