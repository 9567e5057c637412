"""Acceptance and draft cost of every shipped drafter on held-out text: `python -m benchmarks.drafters`.

For each drafter, on the same held-out prompts:

* the first draft after the prompt, which no loop of the target can flatter: tokens per verification and acceptance per
  position, from the engine;
* a run of `specdec bench`: acceptance length and speed-up over plain decoding of greedy continuations, equality of the
  outputs, and the time that drafting takes per step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scripts.corpus import load_corpus
from scripts.drafters.first_round import held_out_prompts
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.lab.environment import environment
from specdec.sdk.packaged import packaged

from .peers.report import Sheet

RESULT = Path(__file__).parent / "results" / "drafters.json"
DRAFTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "n-gram (2..5)": ("tiny", {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
    "suffix": ("tiny", {"method": "suffix"}),
    "draft model": ("tiny", {"model": "tiny/draft"}),
    "PARD": ("tiny", {"model": "tiny/pard"}),
    "EAGLE-1": ("tiny", {"model": "tiny/eagle"}),
    "EAGLE-3": ("tiny", {"model": "tiny/eagle3"}),
    "DFlash (block 8)": ("tiny", {"model": "tiny/dflash"}),
    "DSpark (block 7)": ("tiny", {"model": "tiny/dspark"}),
    "Medusa (3 heads)": ("tiny", {"model": "tiny/medusa", "num_speculative_tokens": 3}),
    "MTP": ("tiny", {"method": "mtp"}),
    "MTP of the hybrid": ("tiny/hybrid", {"method": "mtp"}),
    "MoE draft model": ("tiny/moe", {"model": "tiny/moe_draft"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=192, help="held-out prompts for the first draft")
    parser.add_argument("--bench-prompts", type=int, default=24, help="of them, for the run of `specdec bench`")
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--k", type=int, default=7, help="drafts per step, where the drafter has no limit of its own")
    parser.add_argument("--only", nargs="*", choices=DRAFTERS, help="these drafters")
    parser.add_argument("--save", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = environment(torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(packaged("tiny"))
    prompts = held_out_prompts(tokenizer, load_corpus().held_out, args.prompts)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "held_out.jsonl"
        chosen = prompts[:: max(1, len(prompts) // args.bench_prompts)][: args.bench_prompts]
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in tokenizer.batch_decode(chosen)))
        for name in args.only or DRAFTERS:
            model, config = DRAFTERS[name]
            config = {"num_speculative_tokens": args.k} | config
            first = first_draft(model, config, prompts.tolist())
            rows[name] = {"model": model, "speculative_config": config, "first_draft": first} | bench(
                model, config, file, args.output_len, args.repeat
            )
            print(f"{name}: {first['tokens_per_verification']:.2f}", file=sys.stderr)
    result = {
        "prompts": args.prompts,
        "bench_prompts": args.bench_prompts,
        "output_len": args.output_len,
        "environment": machine,
        "drafters": rows,
    }
    args.save.write_text(json.dumps(result, indent=1) + "\n")
    print(sheet(rows).markdown())


def first_draft(model: str, config: dict[str, Any], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Verification of the one draft that follows each prompt and its first token."""
    k = config["num_speculative_tokens"]
    params = SamplingParams(temperature=0, max_tokens=k + 2, ignore_eos=True, detokenize=False)
    accepted = []
    with LLM(model, speculative_config=config, max_model_len=256, max_num_seqs=16) as llm:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        seen = dict.fromkeys(range(len(prompts)), 0)
        for index, request in enumerate(requests):
            updates = [update for update in llm.stream([request], params) if update.token_ids]
            accepted.append(updates[1].num_accepted)
            seen[index] = len(updates[1].draft_token_ids)
    counts = torch.tensor(accepted)
    return {
        "tokens_per_verification": 1 + float(counts.double().mean()),
        "acceptance_per_position": [float((counts > i).double().mean()) for i in range(k)],
        "drafted_share": sum(1 for length in seen.values() if length) / len(seen),
    }


def bench(model: str, config: dict[str, Any], file: Path, output_len: int, repeat: int) -> dict[str, Any]:
    """What `specdec bench` says of a drafter."""
    command = [
        *(sys.executable, "-m", "specdec", "bench", model, "-sc", json.dumps(config), "--format", "json"),
        *("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "0"),
        *("--output-len", str(output_len), "--repeat", str(repeat), "--num-threads", "1"),
    ]
    plain = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    profiled = json.loads(subprocess.run([*command, "--profile"], check=True, capture_output=True, text=True).stdout)
    kept = ("speedup", "speedup_interval", "mean_acceptance_length", "tokens_per_target_step", "outputs_equal",
            "draft_acceptance_rate", "acceptance_per_position", "num_drafts", "proposer_propose_calls")  # fmt: skip
    calls = profiled["proposer_propose_calls"]
    seconds = profiled["time_shares"]["propose"] * profiled["seconds"]
    return {key: plain[key] for key in kept} | {"propose_ms": 1000 * seconds / calls if calls else None}


def sheet(rows: dict[str, dict[str, Any]]) -> Sheet:
    """A row for each drafter."""
    cells = []
    for name, row in rows.items():
        first = row["first_draft"]
        positions = " ".join(f"{share:.2f}".lstrip("0") for share in first["acceptance_per_position"])
        figures = (row[key] for key in ("mean_acceptance_length", "speedup", "propose_ms"))
        cells.append([name, f"{first['tokens_per_verification']:.2f}", positions, *(f"{each:.2f}" for each in figures)])
    head = ["drafter", "first draft: tokens per verification", "accepted at position 1, 2, 3, ..."]
    return Sheet("Drafters", [*head, "acceptance length, whole run", "speed-up", "draft ms per step"], cells)


if __name__ == "__main__":
    main()
