"""Measure the shipped drafters of the tiny models: `python -m scripts.check_tiny_drafters --record`.

One greedy draft after each held-out prompt, by the shipped bf16 weights in fp32 arithmetic and by the plain modules of
`scripts.drafters`, so without any of the engine's code; and the held-out loss of whole language models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from .batching import TokenStream, encode_documents
from .corpus import load_corpus
from .drafters import dflash, dspark, eagle, eagle3, medusa, mtp
from .drafters.first_round import (
    MAX_TOKENS_PER_DOCUMENT,
    Acceptance,
    FirstRounds,
    acceptance,
    first_rounds,
    held_out_prompts,
)
from .drafters.gated import HYBRID, GatedLayer, ZeroCentredNorm
from .drafters.pard import draft_in_parallel
from .drafters.target import FrozenTarget, continue_greedily
from .drafters.unroll import RowDrafter, draft_token_by_token
from .train_tiny_target import next_token_loss
from .training import mean_loss

NUM_PROMPTS = 512
NUM_DRAFTS = 7
LANGUAGE_MODELS = ("draft", "moe", "moe_draft")

Draft = Callable[[FirstRounds, int], Tensor]  # greedy drafts after each prompt, [B, at most the number asked for]


@dataclass(frozen=True)
class Drafter:
    """One shipped checkpoint."""

    name: str
    target: str  # the folder of the model it drafts for
    weights: str  # its file, below assets/tiny
    load: Callable[[Path, FrozenTarget], Draft]


def load_module(module: nn.Module, path: Path, prefix: str = "") -> nn.Module:
    """The module with the tensors of `path`, all of them and no others."""
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}
    module.load_state_dict(tensors, strict=True)
    return module.float().eval()


@dataclass(frozen=True)
class RowDrafts:
    head: RowDrafter

    def __call__(self, rounds: FirstRounds, num_tokens: int) -> Tensor:
        features = self.head.features(rounds.observation)
        return draft_token_by_token(self.head, features, rounds.next_tokens, num_tokens)


def load_language_model(path: Path, _target: FrozenTarget) -> Draft:
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, local_files_only=True)

    def draft(rounds: FirstRounds, num_tokens: int) -> Tensor:
        return continue_greedily(model, torch.cat([rounds.prompts, rounds.greedy[:, :1]], dim=1), num_tokens)

    return draft


def load_pard(path: Path, _target: FrozenTarget) -> Draft:
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, local_files_only=True)

    def draft(rounds: FirstRounds, num_tokens: int) -> Tensor:
        known = torch.cat([rounds.prompts, rounds.greedy[:, :1]], dim=1)
        return draft_in_parallel(model, known, model.config.pard_token)[:, :num_tokens]

    return draft


def load_eagle3(path: Path, target: FrozenTarget) -> Draft:
    first_ids = torch.arange(eagle3.DRAFT_VOCAB_SIZE)  # replaced by the file's own
    return RowDrafts(load_module(eagle3.Eagle3(first_ids, target.embedding, target.unembedding), path))


def load_eagle(path: Path, target: FrozenTarget) -> Draft:
    return RowDrafts(load_module(eagle.Eagle(target.embedding, target.unembedding), path))


def load_mtp(path: Path, target: FrozenTarget) -> Draft:
    return RowDrafts(load_module(mtp.Mtp(target.embedding, target.unembedding), path, mtp.PREFIX))


def load_hybrid_mtp(path: Path, target: FrozenTarget) -> Draft:
    module = mtp.Mtp(target.embedding, target.unembedding, HYBRID, GatedLayer, ZeroCentredNorm)
    return RowDrafts(load_module(module, path, mtp.PREFIX))


@dataclass(frozen=True)
class BlockDrafts:
    head: dflash.DFlash

    def __call__(self, rounds: FirstRounds, num_tokens: int) -> Tensor:
        return self.head.draft(self.head.features(rounds.observation), rounds.greedy[:, 0])[:, :num_tokens]


def load_dflash(path: Path, target: FrozenTarget) -> Draft:
    return BlockDrafts(load_module(dflash.DFlash(target.embedding, target.unembedding, mask_token_id(path)), path))


def load_dspark(path: Path, target: FrozenTarget) -> Draft:
    return BlockDrafts(load_module(dspark.DSpark(target.embedding, target.unembedding, mask_token_id(path)), path))


def mask_token_id(path: Path) -> int:
    stated: int = json.loads((path.parent / "config.json").read_text(encoding="utf-8"))["mask_token_id"]
    return stated


def load_medusa(path: Path, target: FrozenTarget) -> Draft:
    first_ids = torch.arange(medusa.TRUNCATED_VOCAB_SIZE)
    heads = load_module(medusa.Medusa(first_ids, target.unembedding), path)

    def draft(rounds: FirstRounds, num_tokens: int) -> Tensor:
        return heads.draft(heads.features(rounds.observation))[:, :num_tokens]

    return draft


DRAFTERS = (
    Drafter("draft", "target", "draft/model.safetensors", load_language_model),
    Drafter("pard", "target", "pard/model.safetensors", load_pard),
    Drafter("eagle3", "target", "eagle3/model.safetensors", load_eagle3),
    Drafter("eagle", "target", "eagle/model.safetensors", load_eagle),
    Drafter("mtp", "target", "target/mtp.safetensors", load_mtp),
    Drafter("dflash", "target", "dflash/model.safetensors", load_dflash),
    Drafter("dspark", "target", "dspark/model.safetensors", load_dspark),
    Drafter("medusa", "target", "medusa/model.safetensors", load_medusa),
    Drafter("hybrid_mtp", "hybrid", "hybrid/mtp.safetensors", load_hybrid_mtp),
    Drafter("moe_draft", "moe", "moe_draft/model.safetensors", load_language_model),
)


def measured(assets: Path, drafters: Sequence[Drafter], prompts: Tensor) -> Iterator[tuple[Drafter, Acceptance]]:
    """The acceptance of each drafter's first round after each of `prompts` [B, n]."""
    for target_name in dict.fromkeys(drafter.target for drafter in drafters):
        target = FrozenTarget(assets / target_name, torch.float32)
        rounds = first_rounds(target, prompts, NUM_DRAFTS)
        for drafter in drafters:
            if drafter.target == target_name:
                draft = drafter.load(assets / drafter.weights, target)
                yield drafter, acceptance(rounds, draft(rounds, NUM_DRAFTS))


def held_out_loss(folder: Path, held_out: TokenStream) -> float:
    """In windows of 256 tokens, nats per token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return mean_loss(model, next_token_loss(model, compiled=False), held_out, length=256)


def size_of(path: Path) -> dict[str, Any]:
    tensors = load_file(path)
    numbers = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    return {"file": f"{path.parent.name}/{path.name}", "parameters": numbers, "bytes": path.stat().st_size}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, default=Path("assets/tiny"))
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="held-out prompts")
    parser.add_argument("--only", nargs="*", choices=[drafter.name for drafter in DRAFTERS], help="default: all")
    parser.add_argument("--record", action="store_true", help="write drafters.json")
    arguments = parser.parse_args()
    assets: Path = arguments.assets
    chosen = [drafter for drafter in DRAFTERS if not arguments.only or drafter.name in arguments.only]
    tokenizer = AutoTokenizer.from_pretrained(assets / "target", local_files_only=True)
    documents = load_corpus().held_out
    rows: dict[str, Any] = {}
    for drafter, result in measured(assets, chosen, held_out_prompts(tokenizer, documents, arguments.prompts)):
        rows[drafter.name] = size_of(assets / drafter.weights) | {"first_round": asdict(result)}
        shares = " ".join(f"{share:.2f}" for share in result.accepted_per_position)
        print(f"{drafter.name:10} {result.tokens_per_verify:.2f} tokens per verify, accepted up to 1, 2, ..: {shares}")
    if arguments.record:
        held_out = encode_documents(tokenizer, documents, MAX_TOKENS_PER_DOCUMENT)
        losses = {name: held_out_loss(assets / name, held_out) for name in LANGUAGE_MODELS}
        record = {"drafters": rows, "held_out_nats_per_token": losses}
        print(json.dumps(losses))
        (assets / "drafters.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
