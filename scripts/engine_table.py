"""Write the page "capability x engine" of the docs, from what tests on real engines recorded.

python -m scripts.engine_table              render docs/reference/engines.json again
python -m scripts.engine_table NOTES        take the engines that these notes of tests have from there first

A record holds, by engine and capability, what tests showed: {"test": its id, "propose_calls": of each worker,
"refused": the reason in the error that it provoked, or null}. A note is a line of JSON with one of these, its engine
and its capability.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
RECORD = REFERENCE / "engines.json"
PAGE = REFERENCE / "engines.md"

CAPABILITIES = (
    "host proposers",
    "several requests at a time",
    "a draft network with KV of its own",
    "several proposers in one (a combinator)",
    "hidden states, final and between layers",
    "the target's embedding and head",
    "the target's most likely tokens",
    "the target's keys and values",
    "the target's own layers",
    "grammars of requests",
    "sampling parameters",
    "draft probabilities in verification",
    "sampled text follows the target's distribution",
    "start and finish are told, rows are stable",
    "prompts in chunks",
    "preemption is told",
    "a failing proposer is handled as asked",
    "misuse ends nothing",
    "listeners are shown what was verified",
    "two tensor-parallel workers",
    "two data-parallel ranks",
    "pipeline parallelism",
    "workers on several machines",
    "asynchronous scheduling",
    "a draft network beside a prefix cache",
    "CUDA graphs of draft passes",
    "drafts in trees",
    "targets whose layers keep a state",
    "images in prompts",
    "requests with LoRA adapters",
    "a drafter in a process of its own",
    "a drafter that a server runs",
    "classes written for vLLM's custom_class",
    "candidate generators of transformers",
)
NOT_SHOWN = "no test shows it"

HEAD = f"""\
# What each engine was shown to do

The same proposer classes in our own core, in [vLLM](../how-to/run-in-vllm.md), in
[SGLang](../how-to/run-in-sglang.md) and in [transformers](../how-to/run-in-transformers.md).
`python -m scripts.engine_table` writes this page from `engines.json`. Tests that run the engines write that file
(`.ci/engines`, `.ci/sglang`). A cell leads to the file of its test. Its title names the test, and says how often each
worker called `propose`. A refusal has its reason from the error that the test provoked.
"{NOT_SHOWN}" means just that: it may work, or make no sense for this engine.

"""

Shown = Mapping[str, Any]
Record = Mapping[str, Mapping[str, Sequence[Shown]]]


def page(record: Record) -> str:
    """A row per capability, a column per engine. A cell leads to the file of its first test, and names that test."""
    engines = sorted(record, key=lambda engine: (not engine.startswith("specdec"), engine.lower()))  # our own first
    rows = [
        [capability, *(_cell(record[engine].get(capability, ())) for engine in engines)] for capability in CAPABILITIES
    ]
    head = [["capability", *engines], ["---"] * (len(engines) + 1)]
    return HEAD + "\n".join(f"| {' | '.join(row)} |" for row in (*head, *rows)) + "\n"


def _cell(shown: Sequence[Shown]) -> str:
    if not shown:
        return NOT_SHOWN
    reasons = dict.fromkeys(each["refused"] for each in shown)
    if None in reasons and len(reasons) > 1:
        raise ValueError(f"shown and refused: {', '.join(each['test'] for each in shown)}")
    first = min(shown, key=lambda each: str(each["test"]))
    file, _, test = first["test"].partition("::")
    calls = "".join(f", {number} calls" for number in first["propose_calls"])
    word = "yes" if None in reasons else "refused"
    said = "" if None in reasons else ": " + "; ".join(reason.replace("|", "\\|") for reason in reasons)
    return f'[{word}](../../{file} "{test.partition("[")[0]}{calls}"){said}'


def record_of(notes: Sequence[str]) -> dict[str, dict[str, list[Shown]]]:
    """The record of notes, which came from several processes, by test."""
    record: dict[str, dict[str, list[Shown]]] = {}
    for note in sorted(map(json.loads, notes), key=lambda note: str(note["test"])):
        engine, capability = note.pop("engine"), note.pop("capability")
        record.setdefault(engine, {}).setdefault(capability, []).append(note)
    return record


def main(notes: Path | None) -> None:
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    if notes is not None:
        record |= record_of(notes.read_text().splitlines())
        RECORD.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(page(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
