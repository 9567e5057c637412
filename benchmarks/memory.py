"""Peak memory on a CPU against what it should be: weights, KV, the workspace of a step: `python -m benchmarks.memory`.

Every configuration runs in a process of its own. Measured is memory that no file backs (anonymous and shared pages),
sampled every two milliseconds, beyond what the process holds after its imports. Expected:

* weights: every parameter and buffer of target and drafter, a storage that both use counted once;
* packed: weights laid out for products; some have their plain form beside them;
* KV: the caches of target and drafter, sized here so that the run fills them;
* workspace: 4 * (N * (6 H + 3 I) + 3 R V) bytes, for steps of at most N tokens and R rows of logits, of a model of
  width H, feed-forward width I and vocabulary V: a layer's activations, and the logits with what verification makes
  of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from specdec import LLM, SamplingParams
from specdec.core.host import parts_of
from specdec.core.kernels.cpu.layers import LaidOutLinear
from specdec.lab.environment import environment
from specdec.sdk.extensions import DraftKV

from .peers.report import Sheet
from .peers.targets import circling_llama

RESULT = Path(__file__).parent / "results" / "memory.json"
BATCH, PROMPT, OUTPUT, TOKENS_PER_STEP, K = 8, 256, 64, 512, 5
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "tiny": ("tiny", {}, None),
    "tiny, EAGLE-3": ("tiny", {}, {"model": "tiny/eagle3"}),
    "tiny, DFlash": ("tiny", {}, {"model": "tiny/dflash"}),
    "tiny, draft model": ("tiny", {}, {"model": "tiny/draft"}),
    "random 0.1B": ("random", {}, None),
    "random 0.1B, n-gram": ("random", {}, {"method": "ngram"}),
    "random 0.1B, int8 weights": ("random", {"quantization": "int8_weight_only"}, None),
}


class Peak:
    """The most memory that no file backs while the block runs, in bytes beyond `base`."""

    def __init__(self, base: int = 0) -> None:
        self._base = base
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        last = False
        while not last:
            last = self._done.wait(0.002)
            self.bytes = max(self.bytes, unbacked() - self._base)


def unbacked() -> int:
    """Bytes of this process's resident memory that belong to no file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def measure(model: str, settings: dict[str, Any], speculative: dict[str, Any] | None) -> dict[str, int]:
    """Expected and measured bytes of one configuration, in this process."""
    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)  # what torch allocates when it first computes
    base = unbacked()
    if speculative is not None:
        speculative = speculative | {"num_speculative_tokens": K}
    with Peak(base) as loading:
        llm = LLM(
            model,
            dtype="float32",
            speculative_config=speculative,
            max_model_len=PROMPT + OUTPUT,
            max_num_seqs=BATCH,
            max_num_batched_tokens=TOKENS_PER_STEP,
            **settings,
        )
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    prompts = torch.randint(32, 4000, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    with Peak(base) as running:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    weights, packed = weight_bytes(llm)
    expected = {"weights": weights, "packed": packed, "kv": kv_bytes(llm), "workspace": workspace(llm)}
    return expected | {
        "expected": sum(expected.values()),
        "peak": running.bytes,
        "peak_while_loading": loading.bytes,
        "base": base,
    }


def weight_bytes(llm: LLM) -> tuple[int, int]:
    """Bytes of plain weights, and of those in a layout of their own; each storage once."""
    host = parts_of(llm.engine).host
    networks = [parts_of(llm.engine).model.target.model]
    networks += [each for each in vars(host.proposer).values() if isinstance(each, torch.nn.Module)] if host else []
    modules = [module for network in networks for module in network.modules()]
    tensors = [tensor for network in networks for tensor in (*network.parameters(), *network.buffers())]
    packed = {id(each.packed): each.packed for each in modules if isinstance(each, LaidOutLinear)}
    plain = {each.untyped_storage().data_ptr(): each for each in tensors if id(each) not in packed}
    storages = sum(each.untyped_storage().nbytes() for each in plain.values())
    return storages, sum(each.numel() * each.element_size() for each in packed.values())


def kv_bytes(llm: LLM) -> int:
    """Bytes of the keys and values of target and drafter for all tokens of the run."""
    parts = parts_of(llm.engine)
    per_token = sum(shape.bytes_per_token(parts.model.target.dtype) for shape in parts.model.target.layer_shapes)
    if parts.host and (draft := parts.host.needs.extension(DraftKV)):
        dims = draft.head_dim + (draft.value_head_dim or draft.head_dim)
        per_token += draft.num_layers * draft.num_heads * dims * parts.model.target.dtype.itemsize
    return BATCH * (PROMPT + OUTPUT) * per_token


def workspace(llm: LLM) -> int:
    """What a step takes at most, by the formula above."""
    config = parts_of(llm.engine).model.target.config
    rows = TOKENS_PER_STEP * (6 * config.hidden_size + 3 * config.intermediate_size)
    return 4 * (rows + 3 * BATCH * (K + 1) * config.vocab_size)


def sheet(result: dict[str, Any]) -> Sheet:
    """One row per configuration, in MiB."""
    names = ("weights", "packed", "kv", "workspace", "expected", "peak", "peak_while_loading")
    rows = [
        [name, *(f"{each[key] / 2**20:.0f}" for key in names), f"{(each['peak'] - each['expected']) / 2**20:.0f}"]
        for name, each in result["configurations"].items()
    ]
    head = ["MiB", *(name.replace("_", " ") for name in names), "beyond expected"]
    return Sheet("Memory", head, rows)


def in_own_process(work: Callable[..., dict[str, int]], *args: object) -> dict[str, int]:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    found = {}
    with TemporaryDirectory() as folder:
        circling_llama(12).bfloat16().save_pretrained(folder)  # fp32 would stay in the file's own pages
        for name in args.only:
            model, settings, speculative = CONFIGURATIONS[name]
            found[name] = in_own_process(measure, folder if model == "random" else model, settings, speculative)
    result = {
        "batch": BATCH,
        "prompt_len": PROMPT,
        "output_len": OUTPUT,
        "max_num_batched_tokens": TOKENS_PER_STEP,
        "environment": environment(torch.device("cpu")),
        "configurations": found,
    }
    if args.save:
        args.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(sheet(result).markdown())


if __name__ == "__main__":
    main()
