"""A benchmark's result as tables for people. Every number is one of the result's; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specdec.core.model.text_equality import TextEquality
from specdec.lab.equality import Outputs
from specdec.lab.progress import counted

Result = Mapping[str, Any]


def show_result(result: Result, console: Console) -> None:
    """Print everything but the requests."""
    console.print(Group(*_parts(result)))


def one_line(result: Result) -> str:
    """The line that --format quiet prints."""
    if result["speedup"] is None:
        return f"{result['tokens_per_second']:.1f} tokens/s"
    run = result["configuration"]
    outputs = Outputs(result["outputs_equal"], run["temperature"], run["speculative_config"])
    return (
        f"speedup {_speedup(result)}, acceptance length {result['mean_acceptance_length']:.2f}, outputs {outputs.word}"
    )


def _parts(result: Result) -> Iterator[RenderableType]:
    drafts = result["num_drafts"] > 0
    yield _header(result)
    yield Text("\nSpeculative decoding" if drafts else "\nDecoding", style="bold")
    yield _totals(result)
    if drafts:
        yield Text()
        yield _positions(result)
    if any(result["proposer_figures"].values()):
        yield Text(f"\n{_own_figures(result['proposer_figures'])}")
    yield Text()
    yield _categories(result, drafts=drafts)
    if result["time_shares"]:
        shares = (f"{stage} {100 * share:.0f} %" for stage, share in result["time_shares"].items())
        yield Text(f"\nTime: {' | '.join(shares)}   (host time{_gpu_remark(result)})")
    yield from _equality(result)


def _header(result: Result) -> Text:
    run, machine = result["configuration"], result["environment"]
    hardware = counted(machine["threads"], "CPU thread") if run["device"] == "cpu" else machine["gpu_model"]
    skipped = result["num_prompts_skipped"]
    prompts = counted(result["num_prompts"], "prompt")
    if skipped:
        prompts += f"; {skipped} skipped: longer than max_model_len {run['max_model_len']} - {run['output_len']}"
    sampling = "greedy" if run["temperature"] == 0 else f"temperature {run['temperature']:g}, seed {run['seed']}"
    lines = (
        f"specdec {machine['specdec']} bench",
        f"  target    {run['model']} ({run['dtype']}, {run['device']}, {hardware})",
        f"  proposer  {_proposer(run)}",
        f"  dataset   {run['dataset_name']} ({prompts})",
        f"  run       {run['output_len']} output tokens, {_concurrency(result)}, {sampling}, "
        + counted(run["repeat"], "repeat"),
    )
    return Text("\n".join(lines))


def _concurrency(result: Result) -> str:
    asked = result["configuration"]["max_concurrency"]
    reached = max(row["num_prompts"] for row in result["by_category"].values())
    remark = "" if reached >= asked else f" ({reached} at most: one category at a time)"
    return f"concurrency {asked}{remark}"


def _proposer(run: Mapping[str, Any]) -> str:
    if run["proposer"] is None:
        return "none (plain decoding)"
    config = run["speculative_config"]
    nodes = f", trees of {config['max_nodes']} nodes" if config.get("max_nodes") else ""
    return f"{run['proposer']}, K={config['num_speculative_tokens']}{nodes}"


def _totals(result: Result) -> Table:
    table = _table()
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for label, value, remark in _total_rows(result):
        table.add_row(label, value, remark)
    return table


def _total_rows(result: Result) -> Iterator[tuple[str, str, str]]:
    if result["configuration"]["proposer"] is not None:
        share = f"drafted in {100 * result['drafted_step_share']:.1f} % of steps"
        yield "Acceptance length (drafted steps)", f"{result['mean_acceptance_length']:.2f}", "bonus token included"
        yield "Tokens per target step (all steps)", f"{result['tokens_per_target_step']:.2f}", share
        counts = f"{result['num_accepted_tokens']} of {result['num_draft_tokens']} draft tokens"
        yield "Draft acceptance rate", f"{100 * result['draft_acceptance_rate']:.1f} %", counts
    if result["drafted_trees"]:
        yield from _tree_rows(result["drafted_trees"])
    yield "Tokens per second", f"{result['tokens_per_second']:.1f}", _repeats_remark(result)
    if result["speedup"] is None:
        return
    yield "Tokens per second, no speculation", f"{result['baseline_tokens_per_second']:.1f}", ""
    yield "Speedup vs no speculation", f"{result['speedup']:.2f}x", _interval_remark(result)
    steps = f"step {1000 * result['step_seconds']:.1f} ms, plain {1000 * result['plain_step_seconds']:.1f} ms"
    if result["break_even_tokens_per_step"] < 1:
        steps += "; below 1 it is noise of the times"
    yield "Break-even, tokens per target step", f"{result['break_even_tokens_per_step']:.2f}", steps
    if result["break_even_rows_per_step"] is not None:
        rows = f"{result['rows_per_step']:.1f} computed on average"
        yield "Break-even, rows per target step", f"{result['break_even_rows_per_step']:.1f}", rows


def _own_figures(figures: Mapping[str, float]) -> str:
    """The proposer's own figures that are not 0."""
    told = (f"{name.removeprefix('proposer_')} {value:.6g}" for name, value in figures.items() if value)
    return f"The proposer's own figures: {' | '.join(told)}"


def _tree_rows(trees: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    shape = f"{trees['depth']:.1f} deep, {trees['width']:.1f} wide on average"
    yield "Nodes of a tree", f"{trees['nodes']:.1f}", shape
    wasted = f"{counted(trees['wasted_nodes'], 'node')} wasted, {100 * trees['wasted_share']:.1f} %"
    yield "Accepted depth", f"{trees['accepted_depth']:.2f}", wasted


def _repeats_remark(result: Result) -> str:
    tokens = counted(result["num_output_tokens"], "token")
    return f"{tokens} in {result['seconds']:.2f} s, {counted(len(result['repeats']), 'repeat')}"


def _interval_remark(result: Result) -> str:
    interval = result["speedup_interval"]
    if interval is not None:
        return f"95 % CI {interval[0]:.2f}-{interval[1]:.2f}, {counted(len(result['repeats']), 'paired run')}"
    if result["configuration"]["baseline"] == "auto":
        return "one repeat: no interval"
    return "against an earlier run: not paired"


def _positions(result: Result) -> Table:
    table = _table()
    trees = result["drafted_trees"]
    table.add_column("Draft depth" if trees else "Draft position")
    for position in range(len(result["drafted_per_position"])):
        table.add_column(str(position + 1), justify="right")
    table.add_column("", style="dim")
    table.add_row("drafted", *map(str, result["drafted_per_position"]), "trees as deep" if trees else "")
    if trees:
        table.add_row("nodes of a tree", *(f"{each:.1f}" for each in trees["nodes_per_depth"]), "")
    for label, key, remark in (
        ("accepted, of drafts", "acceptance_per_position", "unconditional"),
        ("accepted, given the one before", "conditional_acceptance_per_position", "conditional"),
    ):
        table.add_row(label, *(f"{rate:.2f}" for rate in result[key]), remark)
    return table


def _categories(result: Result, *, drafts: bool) -> Table:
    columns: dict[str, Callable[[Result], str]] = {"n": lambda row: str(row["num_prompts"])}
    if drafts:
        columns |= {
            "accept len": lambda row: f"{row['mean_acceptance_length']:.2f}",
            "tok/step": lambda row: f"{row['tokens_per_target_step']:.2f}",
            "rate": lambda row: f"{100 * row['draft_acceptance_rate']:.1f} %",
        }
    columns["tok/s"] = lambda row: f"{row['tokens_per_second']:.1f}"
    if result["speedup"] is not None:
        columns |= {"plain": lambda row: f"{row['baseline_tokens_per_second']:.1f}", "speedup": _speedup}
    table = _table()
    table.add_column("Category")
    for name in columns:
        table.add_column(name, justify="right")
    for category, row in result["by_category"].items():
        table.add_row(escape(category), *(cell(row) for cell in columns.values()))
    table.add_row("total", *(cell(result) for cell in columns.values()), style="bold")
    return table


def _equality(result: Result) -> Iterator[RenderableType]:
    if result["outputs_equal"] is None:
        return
    run = result["configuration"]
    outputs = Outputs(result["outputs_equal"], run["temperature"], run["speculative_config"])
    line = f"\nOutputs equal to plain decoding ({outputs.kind}): {result['num_outputs_equal']}/{result['num_prompts']}"
    yield Text(line, style="bold red" if outputs.are_wrong else "")
    promise = TextEquality(**run["text_equality"])
    yield Text(f"  promised here: {promise.sentence}", style="dim")
    for difference in result["differences"]:
        yield Text("  " + difference["sentence"])


def _speedup(row: Mapping[str, Any]) -> str:
    interval = row["speedup_interval"]
    return f"{row['speedup']:.2f}x" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def _gpu_remark(result: Result) -> str:
    return "" if result["configuration"]["device"] == "cpu" else ": work waits in the stage that next needs a result"


def _table() -> Table:
    return Table(box=None, pad_edge=False)
