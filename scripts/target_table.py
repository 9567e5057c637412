"""Write the page "model types" of the docs from what `scripts/target_sweep.py` found.

python -m scripts.target_table
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from .target_sweep import NEWEST, NUM_TOKENS, PROMPT_LENGTHS, RECORD

PAGE = RECORD.with_suffix(".md")
README = RECORD.parents[2] / "README.md"

HEAD = """\
# Model types that are served

Every type that transformers {version} registers for causal language models, and every other that reads several
modalities and writes text. Each is verified by a small model with random float32 weights on a CPU. Three prompts
({lengths} tokens) run in one batch, {tokens} greedy tokens each, with sliding windows and chunks of 8 tokens. Their
text is compared with that of `generate` at batch 1: plain, with n-gram drafts, and with drafts of which half is
garbage. The last run computes prompts in chunks of 16 tokens and preempts requests.

`python -m scripts.target_sweep` verifies, `python -m scripts.target_table` writes this page, and `.ci/full` verifies
every type again. `nox -s targets` does so with the newest transformers.

{sentence}
{variants}

{newest}

| outcome | causal language models | others of several modalities | variants |
|---|---|---|---|
"""

Record = Mapping[str, Mapping[str, Any]]


def sentence(record: Mapping[str, Any]) -> str:
    """What the README says of targets."""
    counts = [(len(_names(types, "equal")), len(types)) for types in (record["types"], record["multimodal"])]
    (served, all_types), (served_too, others) = counts
    return (
        f"transformers {record['transformers']} has {all_types} causal language model types. "
        f"specdec serves {served} of them. Their text equals that of transformers' `generate`. "
        f"It also serves {served_too} of {others} types that read images or sound."
    )


def sentence_of_variants(record: Mapping[str, Any]) -> str:
    """What the page says of forms in which a type is published."""
    served = [len(_names(record[kind], "equal")) for kind in ("types", "variants", "multimodal")]
    return (
        f"Of {len(record['variants'])} common variants of these types {served[1]} are served as well. "
        f"With them {served[0] + served[1]} configurations of causal language models are served, "
        f"and {sum(served)} with the others."
    )


KINDS = "types", "multimodal", "variants"


def changed(record: Mapping[str, Any], newest: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The outcomes by type, with the newest transformers second, where these are two."""
    before, now = (
        {name: _outcome(each) for kind in KINDS for name, each in of[kind].items()} for of in (record, newest)
    )
    pairs = {name: (before.get(name, "not there"), now[name]) for name in sorted(now)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def sentence_of_newest(record: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """What the page says of the newest transformers."""
    version, served = newest["transformers"], len(_names(newest["types"], "equal"))
    return (
        f"With transformers {version}, {served} of {len(newest['types'])} are served. {len(changed(record, newest))} "
        f"types have [another outcome](#with-transformers-{version.replace('.', '')})."
    )


def _differences(record: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """The section of the newest transformers."""
    reasons = {name: each["reason"] or "" for kind in KINDS for name, each in newest[kind].items()}
    rows = (
        f"| `{name}` | {' | '.join(pair)} | {_cell(reasons[name])} |\n"
        for name, pair in changed(record, newest).items()
    )
    return (
        f"\n## With transformers {newest['transformers']}\n\nEvery other type has the same outcome.\n\n"
        f"| type | {record['transformers']} | {newest['transformers']} | reason |\n|---|---|---|---|\n{''.join(rows)}"
    )


def page(record: Mapping[str, Any], newest: Mapping[str, Any]) -> str:
    """How many of each outcome, then the types that are served, then the others with their reasons.

    newest: the record of another transformers, of which the page shows the differences.
    """
    kinds = [record[kind] for kind in KINDS]
    lengths = ", ".join(map(str, PROMPT_LENGTHS))
    head = HEAD.format(
        version=record["transformers"],
        lengths=lengths,
        tokens=NUM_TOKENS,
        sentence=sentence(record),
        variants=sentence_of_variants(record),
        newest=sentence_of_newest(record, newest),
    )
    outcomes = sorted({_outcome(each) for types in kinds for each in types.values()})
    counts = "".join(
        f"| {outcome} | " + " | ".join(str(len(_names(types, outcome))) for types in kinds) + " |\n"
        for outcome in outcomes
    )
    together = {name: shown for types in kinds for name, shown in types.items()}
    return head + counts + _served(together) + "".join(_refused(together)) + _differences(record, newest)


_SERVED = """
## Served

N-gram, suffix and draft-model proposers read no hidden states; heads like EAGLE's and MTP's do.

| type | text equal | hidden states | drafts |
|---|---|---|---|
"""


def _served(types: Record) -> str:
    rows = (
        f"| `{name}` | yes | {_states(types[name])} | {_drafts(types[name])} |\n" for name in _names(types, "equal")
    )
    return _SERVED + "".join(rows)


def _states(shown: Mapping[str, Any]) -> str:
    states = str(shown["hidden_states"])
    return states if states == "shown" else f"refused: {states}"


def _drafts(shown: Mapping[str, Any]) -> str:
    return "all" if shown["hidden_states"] == "shown" else "those that read no hidden states"


def _refused(types: Record) -> list[str]:
    others = sorted(
        (name for name in types if _outcome(types[name]) != "equal"), key=lambda name: _outcome(types[name])
    )
    return [_section(kind, list(names), types) for kind, names in groupby(others, lambda name: _outcome(types[name]))]


def _section(kind: str, names: Sequence[str], types: Record) -> str:
    rows = "".join(f"| `{name}` | {_cell(types[name]['reason'])} |\n" for name in names)
    return f"\n## {kind[0].upper()}{kind[1:]}\n\n| type | reason |\n|---|---|\n{rows}"


def _names(types: Record, outcome: str) -> list[str]:
    return sorted(name for name in types if _outcome(types[name]) == outcome)


def _outcome(shown: Mapping[str, Any]) -> str:
    return f"{shown['outcome']}: {shown['code']}" if shown["code"] else str(shown["outcome"])


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 160 else line[:160] + " ..."


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RECORD.read_text()), json.loads(NEWEST.read_text())))
