"""Train a head on exported data: plain torch, one process, no GPU needed.

    specdec record MODEL -o runs/train --hidden-states 2,4,5,8 ...    # 8: after the last of 8 layers
    specdec export-data runs/train -o data --format speculators
    python train.py eagle3 data heads/mine --target path/to/MODEL --layers 2,4,5

The checkpoint is one of `speculators`, by the configuration and the names of tensors.
"""

import argparse
import json
import time
from pathlib import Path

import pyarrow as pa
import torch
from dflash import DFlash
from eagle3 import Eagle3
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, PretrainedConfig

HEADS = {"eagle3": Eagle3, "dflash": DFlash}
DECAY = 0.8  # of the loss, from one draft token to the next
Batch = tuple[Tensor, Tensor, Tensor]  # input_ids [B, T], loss_mask [B, T], hidden_states [B, T, L, H]


def load_rows(folder: Path) -> list[Batch]:
    """The same of each text, without B."""
    with pa.memory_map(str(folder / "data-00000-of-00001.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    states = [load_file(folder / "hidden_states" / f"hs_{i}.safetensors")["hidden_states"] for i in range(len(rows))]
    return [(torch.tensor(r["input_ids"]), torch.tensor(r["loss_mask"]), s) for r, s in zip(rows, states, strict=True)]


def batches(rows: list[Batch], size: int, generator: torch.Generator) -> list[Batch]:
    """Texts of like lengths together, padded with a loss mask of -1."""
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


def loss_of(head: nn.Module, target_logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy against the target's distributions. The prompt's rows count too: the target has read them."""
    ids, mask, states = batch
    rows, losses = head.rows(ids.shape[1]), []
    for depth, logits in enumerate(head(ids, states[:, :, :-1].flatten(2), rows)):
        inside = rows + 1 + depth < ids.shape[1]  # row t drafts what the target says at t + 1 + depth
        at = (rows + 1 + depth)[inside]
        said, drafted = target_logits[:, at].float(), logits[:, inside].float()
        entropy = -(said.softmax(-1) * log_softmax(drafted, dim=-1)).sum(-1)
        losses.append(DECAY**depth * entropy[mask[:, at] >= 0].mean())
    return torch.stack(losses).sum()


@torch.no_grad()
def agreement(head: nn.Module, rows: list[Batch]) -> list[float]:
    """For each depth: the share of drafts that are the text's next token, where all drafts before them are."""
    right, asked = torch.zeros(head.depths), torch.zeros(head.depths)
    for ids, mask, states in batches(rows, 8, torch.Generator()):
        length = ids.shape[1]
        starts = torch.arange(length - 1)
        alive = torch.ones(len(ids), len(starts), dtype=torch.bool)
        for depth, logits in enumerate(head(ids, states[:, :, :-1].flatten(2), starts)):
            at = (starts + 2 + depth).clamp(max=length - 1)
            known = (mask[:, at] == 1) & (starts + 2 + depth < length)
            asked[depth] += (alive & known).sum()
            alive &= known & (logits.argmax(-1) == ids[:, at])
            right[depth] += alive.sum()
    return (right / asked.clamp(min=1)).tolist()


def write(head: nn.Module, folder: Path, sizes: dict, arguments: argparse.Namespace) -> None:
    """A folder that `specdec` and vLLM serve."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": head.depths}
    verifier = {"name_or_path": str(arguments.target), "architectures": ["AutoModelForCausalLM"]}
    speculators = {"algorithm": arguments.head, "default_proposal_method": "greedy", "proposal_methods": [proposal]}
    config = head.config() | {
        "speculators_model_type": arguments.head,
        "draft_vocab_size": sizes["vocab_size"],
        head.layers_field: arguments.layers,
        "tie_word_embeddings": False,
        "speculators_config": speculators | {"verifier": verifier},
        "transformer_layer_config": {name: each for name, each in sizes.items() if name != "mask_token_id"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: each.detach().contiguous() for name, each in head.tensors().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def sizes_of(head: type, config: PretrainedConfig, mask_token_id: int | None) -> dict:
    """The head's layers: as wide as the target's. mask_token_id: None means the last row of the vocabulary."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = {"model_type": head.model_type, "num_hidden_layers": head.num_layers, "hidden_act": "silu"}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    fixed = {"rms_norm_eps": 1e-6, "rope_parameters": rope, "max_position_embeddings": 4096}
    mask = {"mask_token_id": config.vocab_size - 1 if mask_token_id is None else mask_token_id}
    return {n: getattr(config, n) for n in names} | more | fixed | mask


def optimizers_of(head: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for matrices, which learns more in a few minutes; AdamW for the rest."""
    trained = [each for each in head.parameters() if each.requires_grad]
    muon = torch.optim.Muon([each for each in trained if each.ndim == 2], lr=lr)
    adamw = torch.optim.AdamW([each for each in trained if each.ndim != 2], lr=lr / 7, weight_decay=0.0)
    return [muon, adamw]


def train(head: nn.Module, target: nn.Module, rows: list[Batch], arguments: argparse.Namespace) -> int:
    """Until the time or the steps are over. Returns how many steps were taken."""
    optimizers = optimizers_of(head, arguments.lr)
    groups = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    generator, start, step = torch.Generator().manual_seed(0), time.monotonic(), 0

    def done() -> float:
        return step / arguments.steps if arguments.steps else (time.monotonic() - start) / (60 * arguments.minutes)

    while True:
        for batch in batches(rows, 8, generator):
            if done() >= 1:
                return step
            with torch.autocast("cpu", torch.bfloat16):  # several times as fast where the processor multiplies it
                logits = target.lm_head(target.model.norm(batch[2][:, :, -1]))
                loss = loss_of(head, logits, batch)
            for group, lr in groups:
                group["lr"] = lr * min((step + 1) / 20, 2 * max(1 - done(), 0.01), 1)
            head.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for each in optimizers:
                each.step()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("head", choices=HEADS)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--layers", type=lambda text: [int(each) for each in text.split(",")], required=True)
    parser.add_argument(
        "--mask-token-id", type=int, help="dflash: a token that texts do not hold; the last one if absent"
    )
    parser.add_argument("--held-out", type=Path, help="exported data that is not trained on")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--steps", type=int, help="so many instead of minutes")
    parser.add_argument("--lr", type=float, default=0.02)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).requires_grad_(False)
    kind = HEADS[arguments.head]
    sizes = sizes_of(kind, target.config, arguments.mask_token_id)
    head, rows = kind(target, len(arguments.layers), sizes), load_rows(arguments.data)
    steps = train(head, target, rows, arguments)
    write(head, arguments.out, sizes, arguments)
    found = {"train": agreement(head, rows[:64])}
    if arguments.held_out is not None:
        found["held_out"] = agreement(head, load_rows(arguments.held_out))
    (arguments.out / "agreement.json").write_text(json.dumps(found))
    print(f"{steps} steps;", "; ".join(f"{name} {' '.join(f'{x:.2f}' for x in each)}" for name, each in found.items()))


if __name__ == "__main__":
    main()
