"""A comparison as tables for people. Every number is one of the result's; nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdec.lab.equality import Outputs
from specdec.lab.progress import counted
from specdec.lab.result import places, signed

Result = Mapping[str, Any]
NAMES = {
    "speedup": "speedup",
    "tokens_per_second": "tok/s",
    "tokens_per_target_step": "tok/step",
    "mean_acceptance_length": "accept len",
    "draft_acceptance_rate": "rate",
}


def show_comparison(result: Result, console: Console) -> None:
    """Print a table for each target and dataset, and one of all of them if there are several."""
    console.print(Group(*_parts(result["cells"])))


def one_line(result: Result) -> str:
    """The line that --format quiet prints: the best variant of each table."""
    return "\n".join(map(_best, result["cells"], places(result["cells"])))


def _best(cell: Result, where: str) -> str:
    row, sort = cell["rows"][0], cell["configuration"]["sort"]
    return f"{where}: {row['label']}, {sort} {_figure(sort, row)}"


def _parts(cells: Sequence[Result]) -> Iterator[RenderableType]:
    for cell, place in zip(cells, places(cells), strict=True):
        yield _header(cell, place)
        yield _table(cell)
        yield from _remarks(cell)
    if len(cells) > 1:
        yield from _matrix(cells)


def _header(cell: Result, place: str) -> Text:
    run = cell["configuration"]
    repeats = f", {counted(run['repeat'], 'repeat')}" if cell["baseline"] and "repeat" in run else ""
    line = f"\n{place} ({run['dtype']}, {run['device']}): {counted(cell['num_prompts'], 'prompt')}"
    return Text(line + repeats, style="bold")


def _table(cell: Result) -> Table:
    sort = cell["configuration"]["sort"]
    shown = [name for name in NAMES if cell["rows"][0].get(name) is not None]
    table = Table(box=None, pad_edge=False)
    table.add_column("Proposer", overflow="fold")
    for name in shown:
        table.add_column(NAMES[name] + (" v" if name == sort else ""), justify="right")
    trees = any(row["drafted_trees"] for row in cell["rows"])
    for name in ("drafts/step", *(("depth", "pays up to") if trees else ()), "to the best (95 % CI)", "Pareto"):
        table.add_column(name, justify="right")
    for row in cell["rows"]:
        table.add_row(
            escape(row["label"]),
            *(_figure(name, row) + (_between(name, row) if name == sort else "") for name in shown),
            f"{row['draft_tokens_per_step']:.2f}",
            *((_depth(row), _break_even(row)) if trees else ()),
            "best" if row is cell["rows"][0] else _difference(sort, row),
            "yes" if row["is_on_pareto_front"] else "",
        )
    return table


def _remarks(cell: Result) -> Iterator[RenderableType]:
    if cell["baseline"]:
        yield Text(f"plain decoding: {cell['baseline']['tokens_per_second']:.1f} tokens/s", style="dim")
    yield from _doubts(cell)
    yield Text("Pareto: nothing else gives as many tokens per step from as few drafts", style="dim")
    for row in cell["rows"]:
        if row["outputs_equal"] is False:
            yield from _differences(row, cell)


def _differences(row: Result, cell: Result) -> Iterator[Text]:
    outputs = Outputs(False, cell["configuration"]["temperature"], row["speculative_config"])
    equal = f"{row['num_outputs_equal']}/{cell['num_prompts']}"
    line = f"{row['label']}: outputs equal to plain decoding ({outputs.kind}) {equal}"
    yield Text(line, style="bold red" if outputs.are_wrong else "dim")
    if outputs.are_wrong:
        yield from (Text("  " + each["sentence"]) for each in row["differences"])


def _doubts(cell: Result) -> Iterator[Text]:
    """How far the figures can be trusted, and what makes them better."""
    machine, run, rows = cell["machine"], cell["configuration"], cell["rows"]
    timed = run["sort"] in ("speedup", "tokens_per_second")
    if run.get("times") == "predicted" and cell["baseline"]:
        yield Text("times are predicted from the recorded cost of a step", style="dim")
    if machine["is_busy"] and cell["baseline"]:
        yield Text(
            f"The machine is busy: {_others(machine)}. Times vary more, and intervals are wider.", style="yellow"
        )
    if timed and run["repeat"] == 1 and len(rows) > 1:
        yield Text("One repeat: intervals lack what varies between repeats. Take --repeat 3 or more.", style="yellow")
    below = [row["label"] for row in rows if (row.get("break_even_tokens_per_step") or 1.0) < 1]
    if below:
        yield Text(f"{', '.join(below)}: {BELOW_ONE}", style="yellow")
    needed = [row["to_tell_apart"] for row in rows if row["to_tell_apart"]]
    if needed:
        yield Text(_proposal(run, needed), style="dim")


BELOW_ONE = "a step took less time than one of plain decoding, which no draft brings about: the times are noise"


def _others(machine: Result) -> str:
    told = []
    if machine["load_per_core"] is not None:
        told.append(f"{machine['load_per_core']:.1f} programs for each core before the start")
    if machine["waited_share"]:
        told.append(f"others took {machine['waited_share']:.0%} of a proposer's time")
    return ", ".join(told)


def _proposal(run: Result, needed: Sequence[Result]) -> str:
    """What tells a row from the best one, if they differ by so much; of all rows, the most."""
    most = max(needed, key=lambda each: each["num_prompts"] * each["repeat"])
    prompts = "a recording of " if run.get("times") == "predicted" else ""
    return (
        f"A difference of {most['share']:.0%} to the best is told in 8 of 10 comparisons "
        f"with {prompts}{most['num_prompts']} prompts and --repeat {most['repeat']}."
    )


def _matrix(cells: Sequence[Result]) -> Iterator[RenderableType]:
    """Show one figure of every proposer on every target and dataset: what decides the order, if it does in all."""
    sorts = {cell["configuration"]["sort"] for cell in cells}
    sort = sorts.pop() if len(sorts) == 1 else "tokens_per_target_step"  # which is known everywhere
    table = Table(box=None, pad_edge=False)
    table.add_column("Proposer", overflow="fold")
    for place in places(cells):
        table.add_column(escape(place), justify="right")
    for label in [row["label"] for row in cells[0]["rows"]]:
        rows = [next(row for row in cell["rows"] if row["label"] == label) for cell in cells]
        table.add_row(escape(label), *(_figure(sort, row) for row in rows))
    yield Text(f"\n{sort} on each", style="bold")
    yield table


def _figure(name: str, row: Result) -> str:
    value = row[name]
    if name == "speedup":
        return f"{value:.2f}x"
    if name == "draft_acceptance_rate":
        return f"{100 * value:.1f} %"
    return f"{value:.1f}" if name == "tokens_per_second" else f"{value:.2f}"


def _depth(row: Result) -> str:
    """The depth of drafted trees. Empty for chains."""
    return f"{row['drafted_trees']['depth']:.1f}" if row["drafted_trees"] else ""


def _break_even(row: Result) -> str:
    """The drafts per step at which the row would be as fast as plain decoding, with the tokens that it has."""
    rows = row.get("break_even_rows_per_step")
    return "" if rows is None else f"{max(rows - 1, 0):.1f} drafts"


def _between(name: str, row: Result) -> str:
    interval = row[f"{name}_interval"]
    if not interval:
        return ""
    low, high = [f"{100 * each:.1f}" if name == "draft_acceptance_rate" else f"{each:.2f}" for each in interval]
    return f" ({low}-{high})"


def _difference(sort: str, row: Result) -> str:
    difference, *ends = signed(sort, row["difference_to_best"], *(row["difference_to_best_interval"] or ()))
    return f"{difference} ({' to '.join(ends)})" if ends else difference
