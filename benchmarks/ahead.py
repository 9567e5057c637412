"""A draft model elsewhere, ahead and not ahead, beside the same one in process: `python -m benchmarks.ahead`.

Two targets: `tiny`, and `tiny` stretched. The stretched one has 8 layers, hidden size 512 and 1536 inner units. It
computes what `tiny` computes, as its further weights meet zeros. So drafts are accepted as often, and a pass takes
longer.

Contenders take turns within one run, each with its own threads, and their texts are compared. Behind each speed stand
the parts of a step, and what they say of a second device, where the two do not share cores and memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec import LLM, SamplingParams
from specdec.lab.datasets import load_dataset
from specdec.lab.environment import environment
from specdec.sdk.packaged import packaged

NUM_LAYERS, HIDDEN_SIZE, INNER_SIZE = 8, 512, 1536
FIGURES = ("waited_ms", "drafter_ms", "ahead_whole", "ahead_part", "ahead_missed")


def stretched(source: Path, directory: Path) -> str:
    """A checkpoint of the same function at the cost of a larger one."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    torch.manual_seed(0)
    num_layers = config["num_hidden_layers"]
    found = {name: _grown(name, each) for name, each in weights.items() if ".layers." not in name}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer % num_layers}."
        for name in filter(lambda name, prefix=prefix: name.startswith(prefix), weights):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))  # to what a layer is given
            each = _grown(name, weights[name] * (layer < num_layers or not adds))
            found[name.replace(prefix, f"model.layers.{layer}.", 1)] = each
    sizes = {"num_hidden_layers": NUM_LAYERS, "hidden_size": HIDDEN_SIZE, "intermediate_size": INNER_SIZE}
    config |= sizes | {"layer_types": ["full_attention"] * NUM_LAYERS, "dtype": "float32"}
    directory.mkdir()
    for file in source.glob("*token*"):
        shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def _grown(name: str, tensor: Tensor) -> Tensor:
    """A tensor of the small model in one of the large model's. What is new is random where it meets zeros."""
    rows = tensor.shape[0]
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return tensor.clone()
    if tensor.dim() == 1:  # a norm divides by the root of a mean, of which a part is zeros
        return _put(tensor * (rows / HIDDEN_SIZE) ** 0.5, (HIDDEN_SIZE,), 0.0)
    if name.endswith("o_proj.weight"):
        return _put(tensor, (HIDDEN_SIZE, tensor.shape[1]), 0.0)
    if name.endswith("down_proj.weight"):
        return _put(tensor, (HIDDEN_SIZE, INNER_SIZE), 0.0)
    return _put(tensor, (INNER_SIZE if ".mlp." in name else rows, HIDDEN_SIZE), 0.02 if ".layers." in name else 0.0)


def _put(tensor: Tensor, shape: tuple[int, ...], spread: float) -> Tensor:
    whole = torch.randn(shape) * spread
    whole[tuple(map(slice, tensor.shape))] = tensor
    return whole


def contenders(k: int) -> dict[str, tuple[dict[str, Any] | None, int]]:
    """Their `speculative_config` and the engine's threads."""
    base = {"model": "tiny/draft", "num_speculative_tokens": k}
    process = {"kind": "process", "num_threads": 1}
    return {
        "plain": (None, 1),
        "in process": (base, 1),
        "in process, two threads": (base, 2),
        "elsewhere": (base | {"isolation": process | {"ahead": 0}}, 1),
        "ahead, 8 outcomes": (base | {"isolation": process | {"ahead": 8}}, 1),
        "ahead, auto": (base | {"isolation": process | {"ahead": "auto"}}, 1),
    }


def run(llm: LLM, batch: int, prompts: list[str], params: SamplingParams) -> tuple[list[list[int]], float]:
    """The texts, and tokens per second."""
    texts, start = [], time.perf_counter()
    for first in range(0, len(prompts), batch):
        outputs = llm.generate(prompts[first : first + batch], params)
        texts += [list(each.outputs[0].token_ids) for each in outputs]
    return texts, sum(map(len, texts)) / (time.perf_counter() - start)


def figures(llm: LLM) -> dict[str, float]:
    """Steps, and what the proposer publishes."""
    shown = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    own = {name: sum(value for key, value in shown.items() if key.endswith(f"_{name}")) for name in FIGURES}
    return own | {"steps": shown["specdec:num_steps"]}


def parts(speed: float, tokens: int, spent: Mapping[str, float]) -> dict[str, float]:
    """The milliseconds of a step, and what a second device would make of the speed.

    There drafting takes nothing from verifying, and a draft that is ready costs nothing but the message.
    """
    step = 1000 * tokens / speed / spent["steps"]
    waited, drafter = (spent[name] / spent["steps"] for name in ("waited_ms", "drafter_ms"))
    asked = sum(spent[name] for name in ("ahead_whole", "ahead_part", "ahead_missed"))
    return {
        "step_ms": step,
        "verify_ms": step - waited,
        "waited_ms": waited,
        "drafter_ms": drafter,
        "whole_hits": spent["ahead_whole"] / asked if asked else 0.0,
        "begun_hits": spent["ahead_part"] / asked if asked else 0.0,
    }


def compare(target: str, k: int, batches: list[int], num_rounds: int, num_tokens: int) -> list[dict[str, Any]]:
    """A row for each contender and batch size."""
    shipped = load_dataset("packaged", None)
    prompts = [row.prompt for row in shipped[:: max(1, len(shipped) // 8)]][:8]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    shared: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}
    llms = {
        name: LLM(target, speculative_config=config, num_threads=threads, **shared)
        for name, (config, threads) in contenders(k).items()
    }
    rows = []
    for batch in batches:
        expected = {name: run(llm, batch, prompts, params)[0] for name, llm in llms.items()}  # warm
        before, speeds = {name: figures(llm) for name, llm in llms.items()}, {name: [] for name in llms}
        for _ in range(num_rounds):
            for name, llm in llms.items():
                texts, speed = run(llm, batch, prompts, params)
                assert texts == expected["plain"], f"{name} wrote another text"
                speeds[name].append(speed)
        for name, llm in llms.items():
            spent = {key: value - before[name][key] for key, value in figures(llm).items()}
            speed = statistics.median(speeds[name])
            row = {"target": target, "k": k, "batch": batch, "contender": name, "tokens_per_second": speed}
            total = len(prompts) * num_tokens * num_rounds
            rows.append(row | {"all": speeds[name]} | parts(speed, total, spent))
        _predict(rows[-len(llms) :])
    for llm in llms.values():
        llm.close()
    return rows


def _predict(rows: list[dict[str, Any]]) -> None:
    """A second device: verifying as where nothing is prepared, and waiting as where drafts are."""
    by_name = {row["contender"]: row for row in rows}
    plain = by_name["elsewhere"]
    for name in ("ahead, 8 outcomes", "ahead, auto"):
        row = by_name[name]
        step = plain["verify_ms"] + row["waited_ms"]
        row["on_a_second_device"] = row["tokens_per_second"] * row["step_ms"] / step
        row["to_not_ahead"] = row["tokens_per_second"] / plain["tokens_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--only", choices=["tiny", "stretched"], nargs="+", default=["tiny", "stretched"])
    parser.add_argument("--save", type=Path, help="None is written without it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        targets = {"tiny": "tiny"}
        if "stretched" in args.only:
            targets["stretched"] = stretched(packaged("tiny"), Path(folder) / "stretched")
        rows = []
        for name in args.only:
            found = compare(targets[name], args.k, args.batch, args.rounds, args.output_len)
            rows += [row | {"target": name} for row in found]
    for row in rows:
        numbers = {key: round(value, 2) for key, value in row.items() if isinstance(value, float)}
        print(row["target"], f"B{row['batch']}", row["contender"], numbers)
    if args.save is not None:
        shown = {"environment": environment(torch.device("cpu")), "rows": rows}
        args.save.write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
