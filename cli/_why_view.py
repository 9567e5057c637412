"""Rejections as tables for people. Every number is one of the result's; nothing is computed here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdec.lab.report.content import HEADS

Result = Mapping[str, Any]
SHOWN_CONTEXT = 48


def show_why(result: Result, console: Console) -> None:
    """Print everything but the single misses."""
    for row in result["rows"]:
        console.print(Group(*_parts(row)))


def one_line(result: Result) -> str:
    """The line that --format quiet prints."""
    return "\n".join(f"{row['label']}: {_losses(row)}" for row in result["rows"])


def _parts(row: Result) -> Iterator[RenderableType]:
    yield Text(f"\n{row['label']}", style="bold")
    yield Text(_losses(row))
    yield Text(_trees(row))
    ranks = ", ".join(f"{rank}: {count}" for rank, count in row["ranks"].items())
    yield Text(f"The target's rank of rejected tokens: {ranks or 'none'}")
    for name, kinds in row["summary"].items():
        yield Text()
        yield _tallies(HEADS[name], kinds)
    if row["costliest_contexts"]:
        yield Text("\nCostliest contexts", style="bold")
        yield _contexts(row)


def _losses(row: Result) -> str:
    losses = row["losses"]
    refused = losses["misses_refused_by_grammars"]
    by_grammars = f"; grammars refuse {refused} of them, {losses['lost_to_refused_misses']}" if refused else ""
    return (
        f"{losses['first_token_misses']} misses at the first position cost {losses['lost_to_first_token_misses']} "
        f"draft tokens, {losses['late_misses']} later ones {losses['lost_to_late_misses']}{by_grammars}"
    )


def _trees(row: Result) -> str:
    trees = row["trees"]
    if not trees["known_for_width_2"]:
        return f"What a tree would have caught is unknown: distributions are {row['proposer_distributions']}"
    return (
        f"A tree of width 2 would have caught {trees['caught_by_width_2']} of {trees['known_for_width_2']} misses "
        f"whose second choice is known, of width 3 {trees['caught_by_width_3']} of {trees['known_for_width_3']} "
        f"(distributions: {row['proposer_distributions']})"
    )


def _tallies(head: str, kinds: Mapping[str, Result]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(head)
    for name in ("tried", "accepted", "rejected", "rate", "lost drafts"):
        table.add_column(name, justify="right")
    for kind, tally in kinds.items():
        counts = (str(tally[name]) for name in ("tried", "accepted", "rejected"))
        table.add_row(escape(kind), *counts, f"{100 * tally['rate']:.1f} %", str(tally["lost_draft_tokens"]))
    return table


def _contexts(row: Result) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("lost", "misses"):
        table.add_column(name, justify="right")
    for name in ("drafted", "target", "behind"):
        table.add_column(name)
    for each in row["costliest_contexts"]:
        context = each["context"][-SHOWN_CONTEXT:]
        texts = (escape(json.dumps(text, ensure_ascii=False)) for text in (each["drafted"], each["target"], context))
        table.add_row(str(each["lost_draft_tokens"]), str(each["misses"]), *texts)
    return table
