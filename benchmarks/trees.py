"""What trees of drafts bring: tokens per verification on held-out prompts, and tokens per second of CPU time.

    python -m benchmarks.trees [--prompts 192] [--skip 0] [--draws 2] [--batch 1 4 16] [--turns 3] [--save FILE]
        [--parts acceptance texts speed]

Acceptance is that of the first draft after a prompt of 128 tokens. Given the drafts that the engine verifies, it is the
expectation over all decisions of the rule, computed with the specification. So only prompts and draws are chance.

Of whole texts, tokens per verification are counted over so many tokens behind each prompt.

Speeds are measured in turns. One engine per setting lives in one process, and each turn's rate is divided by that of
plain decoding in the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scripts.corpus import load_corpus
from scripts.drafters.first_round import held_out_prompts
from torch import Tensor
from transformers import AutoTokenizer

from specdec import LLM, SamplingParams
from specdec.core.engine.assembly import parts_of
from specdec.core.rejection import DraftRows, SamplingRows, Verdict, verify, verify_block
from specdec.lab.datasets import load_dataset
from specdec.lab.environment import environment
from specdec.sdk.packaged import packaged
from specdec.testing.rejection.reference import Params, draft_distribution, target_distribution
from specdec.testing.rejection.tree_reference import Nodes, left_of, part

BATCH = 16
SPARSE = 256  # the default of sparse_top_m


@dataclass(frozen=True)
class Setting:
    """One way to draft."""

    model: str
    depth: int
    nodes: int | None  # None: a chain
    temperature: float = 0.0
    drawn: bool = False
    rule: str = "block"
    top_m: int | None = None  # entries of a sparse distribution; None: the whole vocabulary is reported

    @property
    def name(self) -> str:
        shape = f"chain {self.depth}" if self.nodes is None else f"{self.nodes} nodes"
        how = f", drawn, {self.rule}" if self.drawn else ", one-hot" if self.temperature else ""
        how += f", most likely {self.top_m}" if self.top_m else ""
        return f"{self.model}, {shape}, temperature {self.temperature:g}{how}"

    @property
    def config(self) -> dict[str, object]:
        config: dict[str, object] = {
            "model": f"tiny/{self.model}",
            "num_speculative_tokens": self.depth,
            "draft_sample_method": "probabilistic" if self.drawn else "greedy",
            "rejection_sample_method": self.rule,
        }
        if self.drawn:
            config["draft_distribution"] = "sparse" if self.top_m else "dense"
            config |= {"sparse_top_m": self.top_m} if self.top_m else {}
        return config if self.nodes is None else config | {"max_nodes": self.nodes}


def acceptance_settings() -> Iterator[Setting]:
    for nodes in (None, 16):
        yield Setting("eagle3", 7, nodes, 1.0, drawn=True)
        yield Setting("eagle3", 7, nodes, 1.0, drawn=True, top_m=SPARSE)
        yield Setting("eagle3", 7, nodes)
        yield Setting("eagle3", 7, nodes, 1.0)
        yield Setting("eagle3", 7, nodes, 1.0, drawn=True, rule="standard")
        yield Setting("dflash", 7, nodes, 1.0, drawn=True)
    for nodes in (8, 32, 60):
        yield Setting("eagle3", 7, nodes, 1.0, drawn=True)
        yield Setting("eagle3", 7, nodes)
    for nodes in (None, 16, 32):
        yield Setting("medusa", 3, nodes)


def speed_settings(temperature: float) -> Iterator[Setting]:
    drawn = temperature > 0
    top_m = SPARSE if drawn else None
    for model, depth in (("eagle3", 5), ("dflash", 7)):
        for nodes in (None, 8, 16):
            yield Setting(model, depth, nodes, temperature, drawn, top_m=top_m)


class FirstDrafts:
    """A verification rule that remembers what is to be expected of the drafts it verifies."""

    def __init__(self, *, together: bool) -> None:
        self.rule, self._together = verify_block if together else verify, together
        self.expected: dict[int, float] = {}  # tokens of a verified draft, by the request's seed
        self.accepted: list[int] = []

    def __call__(
        self, logits: Tensor, cu_rows: Tensor, drafts: DraftRows, sampling: SamplingRows, *, workspace: object = None
    ) -> Verdict:
        drafted = drafts.lengths.nonzero()[:, 0].tolist()
        for b in drafted:
            nodes = nodes_of(logits[cu_rows[b] : cu_rows[b + 1]], drafts, b, float(sampling.temperature[b]))
            self.expected[int(sampling.seed[b])] = 1 + self._expected(nodes)
        verdict = self.rule(logits, cu_rows, drafts, sampling)
        self.accepted += (1 + verdict.num_accepted[drafted]).tolist()
        return verdict

    def _expected(self, nodes: Nodes) -> float:
        if not nodes.q:
            return of_one_hot(nodes)
        return of_traversal(nodes, 0, 1.0, 1.0, 0)[0] if self._together else of_rounds(nodes, 0)


def nodes_of(logits: Tensor, drafts: DraftRows, b: int, temperature: float) -> Nodes:
    """A request's draft, with what it was drawn from."""
    length = int(drafts.lengths[b])
    parents = [*range(-1, length - 1)] if drafts.parents is None else drafts.parents[b, :length].tolist()
    ids = drafts.token_ids[b, :length].tolist()
    q = []
    for node, parent in enumerate(parents if drafts.distributions is not None else ()):
        assert drafts.distributions is not None
        whole = draft_distribution(drafts.distributions, b, parent + 1, logits.shape[1])
        if whole is not None:
            q.append(left_of(whole, [ids[other] for other in range(node) if parents[other] == parent]))
    p = [target_distribution(row, Params(temperature=temperature)) for row in logits]
    return Nodes(parents, ids, p, q)


def of_one_hot(nodes: Nodes) -> float:
    """Drafts that are accepted: the sum of the target's probability of each path."""
    reach = [1.0]
    for parent, token in zip(nodes.parents, nodes.token_ids, strict=True):
        reach.append(reach[parent + 1] * float(nodes.p[parent + 1][token]))
    return sum(reach[1:])


def of_rounds(nodes: Nodes, place: int) -> float:
    """Drafts that multi-round rejection accepts below a place."""
    p, going, total = nodes.p[place], 1.0, 0.0
    for child in nodes.children(place):
        accept, _, p = part(1.0, p, nodes.q[child], nodes.token_ids[child])
        total += going * accept * (1 + of_rounds(nodes, child + 1)) if going * accept > 1e-9 else 0.0
        going *= 1 - accept
    return total


def of_traversal(nodes: Nodes, place: int, weight: float, going: float, depth: int) -> tuple[float, float]:
    """Drafts that traversal accepts from places here and below, and the probability that all of them fail."""
    p, total = nodes.p[place], 0.0
    for child in nodes.children(place):
        below, weight, p = part(weight, p, nodes.q[child], nodes.token_ids[child])
        gained, going = of_traversal(nodes, child + 1, below, going, depth + 1)
        total += gained
    accept = 1.0 if place == 0 else min(weight, 1.0)
    return total + going * accept * depth, going * (1 - accept)


def acceptance(setting: Setting, prompts: Tensor, num_draws: int) -> dict[str, float]:
    """Tokens per verification of the first draft after each prompt."""
    llm = LLM("tiny", speculative_config=setting.config, max_num_seqs=BATCH, num_threads=1, max_model_len=256)
    watched = FirstDrafts(together=setting.rule == "block")
    parts_of(llm.engine).runner._rule = watched
    engine = llm.engine
    apart = max(1000, len(prompts))  # seeds of two draws of a prompt
    for draw in range(num_draws if setting.temperature else 1):
        for first in range(0, len(prompts), BATCH):
            for number, each in enumerate(prompts[first : first + BATCH].tolist()):
                seed = apart * draw + first + number
                params = SamplingParams(temperature=setting.temperature, max_tokens=100, ignore_eos=True, seed=seed)
                engine.add_request(each, params)
            while engine.has_unfinished_requests:
                for name in [each.request.request_id for each in engine.step() if each.num_drafted]:
                    engine.abort(name)
    values = watched.expected
    by_prompt = [[values[seed] for seed in values if seed % apart == number] for number in range(len(prompts))]
    return {
        "tokens_per_verification": round(statistics.mean(values.values()), 3),
        "standard_error": round(error_of(by_prompt), 3),
        "as_decided": round(statistics.mean(watched.accepted), 3),
        "drafts": len(values),
    }


def error_of(by_prompt: Sequence[Sequence[float]]) -> float:
    """Standard error of the mean. The drafts of one prompt are alike, so their mean is one observation."""
    means = [statistics.mean(each) for each in by_prompt]
    return statistics.stdev(means) / len(means) ** 0.5


def of_texts(setting: Setting, prompts: Tensor, length: int) -> float:
    """Tokens per verification of greedy texts."""
    llm = LLM("tiny", speculative_config=setting.config, max_num_seqs=BATCH, num_threads=1, max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts.tolist()], params)
    steps = sum(each.outputs[0].spec_decode_metrics["num_target_steps"] for each in outputs)
    return round(length * len(outputs) / steps, 3)


def speeds(settings: Sequence[Setting], batch: int, turns: int, length: int) -> dict[str, float]:
    """Tokens per second of CPU time, as multiples of plain decoding: the median of the turns."""
    texts = ([row.prompt for row in load_dataset("packaged", None)] * 2)[: max(batch, 8)]
    shared = {"max_num_seqs": batch, "num_threads": 1, "max_model_len": 512, "enable_prefix_caching": False}
    plain, *llms = (LLM("tiny", speculative_config=each, **shared) for each in (None, *(s.config for s in settings)))
    ratios: dict[str, list[float]] = {each.name: [] for each in settings}
    for turn in range(turns + 1):
        base = rate(plain, texts, settings[0].temperature, length)
        for each, llm in zip(settings, llms, strict=True):
            found = rate(llm, texts, each.temperature, length)
            if turn:  # the first one warms up
                ratios[each.name].append(found / base)
    return {name: round(statistics.median(each), 2) for name, each in ratios.items()}


def rate(llm: LLM, texts: Sequence[str], temperature: float, length: int) -> float:
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, seed=seed)
        for seed in range(len(texts))
    ]
    start = time.process_time()
    llm.generate(list(texts), params)
    return len(texts) * length / (time.process_time() - start)


class Results:
    """Figures by part and name, printed and saved as they come. Parts that are not measured stay as they were."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, dict[str, object]] = json.loads(path.read_text()) if path and path.exists() else {}

    def note(self, part: str, name: str, value: object) -> None:
        self._found.setdefault(part, {})[name] = value
        print(part, name, value, flush=True)
        if self._path:
            self._path.write_text(json.dumps(self._found, indent=1) + "\n")


def prompts_of(args: argparse.Namespace) -> Tensor:
    """[n, 128], held out of the training of target and drafters."""
    tokenizer = AutoTokenizer.from_pretrained(packaged("tiny"), local_files_only=True)
    return held_out_prompts(tokenizer, load_corpus().held_out, args.prompts)[args.skip :]


def part_of(name: str, args: argparse.Namespace) -> str:
    """Where figures are saved: those of fewer prompts beside those of all."""
    return f"{name} without the first {args.skip} prompts" if args.skip else name


def measure_acceptance(args: argparse.Namespace, results: Results) -> None:
    prompts = prompts_of(args)
    for setting in acceptance_settings():
        if args.only in setting.name:
            results.note(part_of("acceptance", args), setting.name, acceptance(setting, prompts, args.draws))


def measure_texts(args: argparse.Namespace, results: Results) -> None:
    prompts = prompts_of(args)
    for setting in acceptance_settings():
        if args.only in setting.name and not setting.temperature:
            name = f"{setting.name}, {args.length} tokens"
            results.note(part_of("texts", args), name, of_texts(setting, prompts, args.length))


def measure_speed(args: argparse.Namespace, results: Results) -> None:
    for temperature in args.temperature:
        for batch in args.batch:
            settings = [each for each in speed_settings(temperature) if args.only in each.name]
            found = speeds(settings, batch, args.turns, args.length) if settings else {}
            for name, value in found.items():
                results.note("speed", f"{name}, {batch} requests", value)


PARTS = {"acceptance": measure_acceptance, "texts": measure_texts, "speed": measure_speed}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each figure; save all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=192)
    parser.add_argument("--skip", type=int, default=0, help="of these prompts, how many of the first are left out")
    parser.add_argument("--draws", type=int, default=2, help="drafts of each prompt at temperature 1")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="of the speeds")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--length", type=int, default=64, help="tokens of each text whose time is taken")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = Results(args.save)
    for name, value in environment(torch.device("cpu")).items():
        results.note("environment", name, value)
    for part_name in args.parts:
        PARTS[part_name](args, results)


if __name__ == "__main__":
    main()
