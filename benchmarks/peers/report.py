"""Tables of a result: for the terminal, and in Markdown for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from .contender import Contender

ENGINES = {"ours": "ours", "transformers": "transformers", "vllm": "vLLM"}
PRECISIONS = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "int8": "int8 weights",
    "float32-compiled": "fp32, compiled",
    "bfloat16-compiled": "bf16, compiled",
    "int8-compiled": "int8 weights, compiled",
}


class Sheet(NamedTuple):
    """A table before it is drawn."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def rich(self) -> Table:
        table = Table(*self.head, title=self.title, title_justify="left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speeds(result: dict[str, Any]) -> Sheet:
    """Tokens per second: a row per contender, a column per batch size; who does not run, with the reason."""
    batches = sorted({row["batch"] for row in result["runs"]})
    by_contender: dict[Contender, list[dict[str, Any]]] = {}
    for row in result["runs"] + result["refused"]:
        by_contender.setdefault(Contender(row["engine"], row["method"], row["precision"]), []).append(row)
    rows = []
    for contender in sorted(by_contender, key=lambda each: list(ENGINES).index(each.engine)):
        ran = {row["batch"]: row for row in by_contender[contender] if "reason" not in row}
        rows.append(
            [
                ENGINES[contender.engine],
                contender.method,
                PRECISIONS[contender.precision],
                *(spread(ran[batch]["tokens_per_second"], ".0f") if batch in ran else "-" for batch in batches),
                f"{min(row['same_text'] for row in ran.values()):.0%}" if ran else "-",
                "; ".join(dict.fromkeys(row["reason"] for row in by_contender[contender] if "reason" in row)),
            ]
        )
    head = ["engine", "method", "weights", *(f"batch {batch}" for batch in batches), "same text", "why not"]
    return Sheet(f"{result['target']['name']}: output tokens per second, median (range)", head, rows)


def goals(result: dict[str, Any]) -> Sheet:
    """Each goal, the ratio that was measured, and whether that is enough."""
    rows = [
        [
            str(goal["batch"]),
            goal["ours"],
            goal["other"],
            f"{goal['goal']:g}",
            f"{goal['median']:.2f} ({goal['range'][0]:.2f}-{goal['range'][1]:.2f})",
            "met" if goal["met"] else f"missed by {1 - goal['median'] / goal['goal']:.0%}",
        ]
        for goal in result["goals"]
    ]
    head = ["batch", "ours", "against", "goal", "ratio, median (range)", "met"]
    return Sheet(f"{result['target']['name']}: goals", head, rows)


def conditions(result: dict[str, Any]) -> str:
    """What the figures depend on, in one paragraph."""
    task, target, machine = result["task"], result["target"], result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    compiled = "eager" if task["vllm_eager"] else "compiled"
    return (
        f"{target['name']}: {target['num_parameters'] / 1e6:.1f} M parameters, vocabulary {target['vocab_size']}. "
        f"{machine['cpu_model']}, {machine['cores']} cores, {task['num_threads']} thread(s) for every engine. Greedy, "
        f"{result['prompts']}, {task['output_len']} output tokens, at most {task['k']} drafts a step (Medusa 3); "
        f"{result['rounds']} rounds, {result['clock']} clock. {versions}, vLLM {compiled}, transformers eager, "
        "ours compiled where that is said."
    )


def spread(values: Sequence[float], form: str) -> str:
    """Median (least-greatest)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
