"""The engine against transformers' `generate` on the same model, prompts and threads, side by side in one run.

    python benchmarks/engine.py --output benchmarks/results/engine-tiny.json
    python benchmarks/engine.py --model random-0.1b --output benchmarks/results/engine-random-0.1b.json

Each round times every contender once, in turn; ratios are taken within a round, and medians over the rounds are
reported with the whole range. A contender's time covers prefill and decoding of all its prompts, tokenization
excluded. Everything is greedy, fp32, and forced to the full output length. On a machine that others use too,
`--clock cpu --num-threads 1` counts the seconds that this process really had a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import LLM, SamplingParams
from specdec.core.bench.environment import environment
from specdec.core.runner.model_support import locate_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
GOALS = {
    "plain / transformers": 1.0,
    "ngram / transformers prompt lookup": 1.0,
    "ngram / plain": 1.0,
    "plain at batch 8 / plain at batch 1": 4.0,
}


@dataclass(frozen=True)
class Contender:
    name: str
    run: Callable[[list[list[int]]], int]  # prompts -> tokens generated


def random_llama(directory: Path) -> str:
    """A Llama of 0.11 B parameters with random weights and a vocabulary of 32,000."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return str(directory)


def prompts_of(model: str, path: str, count: int) -> dict[str, list[list[int]]]:
    """Token ids by kind: the shipped prompts, or for random weights random tokens with a repeated middle."""
    if model == "tiny":
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        lines = (Path(path).parent / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
        kinds: dict[str, list[list[int]]] = {}
        for row in map(json.loads, lines):
            kinds.setdefault(row["category"], []).append(tokenizer(row["prompt"])["input_ids"])
        return {kind: prompts[:count] for kind, prompts in kinds.items()}
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(10, 32000, (48,), generator=generator).tolist() for _ in range(count)]
    return {"random": [part + part[:24] for part in ids]}


def contenders(path: str, output_len: int) -> list[Contender]:
    """Ours plain, with n-gram and in a batch of 8; transformers plain and with prompt lookup."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    plain, ngram = LLM(path, max_model_len=1024), LLM(path, max_model_len=1024, speculative_config=NGRAM)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    reference.generation_config.pad_token_id = 0

    def ours(llm: LLM, batch: int) -> Callable[[list[list[int]]], int]:
        def run(prompts: list[list[int]]) -> int:
            outputs = []
            for start in range(0, len(prompts), batch):
                outputs += llm.generate(prompts[start : start + batch], params)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        return run

    def theirs(**settings: object) -> Callable[[list[list[int]]], int]:
        def run(prompts: list[list[int]]) -> int:
            total = 0
            for prompt in prompts:
                ids = torch.tensor([prompt])
                done = reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=output_len,
                    min_new_tokens=output_len,
                    do_sample=False,
                    **settings,
                )
                total += done.shape[1] - len(prompt)
            return total

        return run

    return [
        Contender("plain", ours(plain, 1)),
        Contender("transformers", theirs()),
        Contender("ngram", ours(ngram, 1)),
        Contender("transformers prompt lookup", theirs(prompt_lookup_num_tokens=5)),
        Contender("plain at batch 8", ours(plain, 8)),
        Contender("ngram at batch 8", ours(ngram, 8)),
    ]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(
    all_contenders: list[Contender], prompts: list[list[int]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Tokens per second of each contender in each round."""
    speeds: dict[str, list[float]] = {contender.name: [] for contender in all_contenders}
    for contender in all_contenders:
        contender.run(prompts[:1])
    for _ in range(rounds):
        for contender in all_contenders:
            started = clock()
            tokens = contender.run(prompts)
            speeds[contender.name].append(tokens / (clock() - started))
    return speeds


def ratios(speeds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Each goal's ratio within a round: median, least and greatest over the rounds."""
    pairs = {
        "plain / transformers": ("plain", "transformers"),
        "ngram / transformers prompt lookup": ("ngram", "transformers prompt lookup"),
        "ngram / plain": ("ngram", "plain"),
        "plain at batch 8 / plain at batch 1": ("plain at batch 8", "plain"),
    }
    found = {}
    for name, (ours, theirs) in pairs.items():
        each = [a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True)]
        found[name] = {"median": statistics.median(each), "min": min(each), "max": max(each), "goal": GOALS[name]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "random-0.1b"])
    parser.add_argument("--num-prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", default="wall", choices=sorted(CLOCKS), help="cpu: for one thread only")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.clock == "cpu" and args.num_threads != 1:
        parser.error("--clock cpu adds the seconds of all threads up; pass --num-threads 1")
    torch.set_num_threads(args.num_threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        path = locate_model("tiny") if args.model == "tiny" else random_llama(Path(directory))
        prompts = prompts_of(args.model, path, args.num_prompts)
        racing = contenders(path, args.output_len)
        kinds = {}
        for kind, of_kind in prompts.items():
            speeds = measure(racing, of_kind, args.rounds, CLOCKS[args.clock])
            kinds[kind] = {"tokens_per_second": speeds, "ratios": ratios(speeds)}
            print(f"{args.model}, {kind}: {len(of_kind)} prompts, {args.output_len} tokens, {args.rounds} rounds")
            for name, values in speeds.items():
                print(f"  {name:<28} {statistics.median(values):8.1f} tokens/s")
            for name, ratio in kinds[kind]["ratios"].items():
                spread = f"({ratio['min']:.2f} .. {ratio['max']:.2f})"
                print(f"  {name:<38} {ratio['median']:5.2f}  {spread}  goal {ratio['goal']}")
    result = {
        "model": args.model,
        "output_len": args.output_len,
        "rounds": args.rounds,
        "clock": args.clock,
        "num_threads": args.num_threads,
        "speculative_config": NGRAM,
        "dtype": "float32",
        "environment": environment(torch.device("cpu")),
        "kinds": kinds,
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
