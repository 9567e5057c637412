"""The plots of a report, as plotly figures without colours of a theme: the page adds those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from plotly import graph_objects as go

from ..intervals import wilson
from .content import Content, Run

COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#06b6d4", "#ec4899", "#84cc16")
MOST_SHOWN = 5  # further runs wait in the legend
BESIDE = 0.09  # of a position, so that bars of several runs stand beside each other


@dataclass(frozen=True)
class Plot:
    """A figure, or the reason why there is none."""

    name: str
    title: str
    note: str
    figure: go.Figure | None


def plots(content: Content) -> list[Plot]:
    """Draw the plots for which the result has figures. The others say why they are absent. Needs plotly."""
    return [_acceptance(content), _heat_map(content), _by_length(content), _step_time(content), _drafts(content)]


def _acceptance(content: Content) -> Plot:
    title = "Acceptance by draft position"
    traces = []
    for number, run in enumerate(_drafting(content)):
        drafts, rates = run.facts["num_drafts"], run.facts["acceptance_per_position"]
        bounds = [wilson(round(rate * drafts), drafts) for rate in rates]
        positions = range(1, len(rates) + 1)
        traces.append(_line(number, run.label, positions, rates, bounds, "position %{customdata}: %{y:.1%}"))
    if not traces:
        return Plot("acceptance", title, "Nothing was drafted.", None)
    layout = _layout("draft position", "accepted / drafted steps", integers=True)
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    note = "Bars are 95 % Wilson intervals, which take steps as independent of each other."
    return Plot("acceptance", title, note, go.Figure(traces, layout))


def _heat_map(content: Content) -> Plot:
    title = "Acceptance by position and the target's entropy"
    maps = [(run, run.facts["position_entropy"]) for run in content.runs if run.facts.get("position_entropy")]
    if not maps:
        note = "The target's probabilities were not kept. `specdec why` on a recording draws this plot."
        return Plot("heatmap", title, note, None)
    run, cells = maps[0]
    rates = [
        [a / n if n else None for a, n in zip(*row, strict=True)]
        for row in zip(cells["accepted"], cells["tried"], strict=True)
    ]
    trace = go.Heatmap(
        x=cells["entropy"],
        y=[f"{position + 1}" for position in range(len(rates))],
        z=rates,
        text=[[f"n={tried}" if tried else "" for tried in row] for row in cells["tried"]],
        texttemplate="%{text}",
        customdata=cells["tried"],
        zmin=0,
        zmax=1,
        colorscale="Viridis",
        colorbar={"tickformat": ".0%", "thickness": 12},
        hovertemplate="position %{y}, entropy %{x}: %{z:.1%} of %{customdata}<extra></extra>",
        xgap=2,
        ygap=2,
    )
    layout = _layout("entropy of the target's distribution, nats", "draft position")
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    layout["xaxis"] |= {"type": "category"}
    return Plot(
        "heatmap",
        title,
        f"{run.label}. Drafts that were reached, by what the target was sure of.",
        go.Figure([trace], layout),
    )


def _by_length(content: Content) -> Plot:
    runs = sorted((run for run in content.runs if run.draft_length), key=lambda run: (run.family, run.draft_length))
    metric = "speedup" if all(run.facts.get("speedup") is not None for run in runs) else "tokens_per_target_step"
    title = "Speed-up by K" if metric == "speedup" else "Tokens per step by K"
    if len({run.draft_length for run in runs}) < 2:
        note = "One draft length was measured. `specdec compare --sweep num_speculative_tokens=1..8` draws this plot."
        return Plot("by_length", title, note, None)
    traces = []
    for number, (family, group) in enumerate(groupby(runs, key=lambda run: run.family)):
        members = list(group)
        values = [run.facts[metric] for run in members]
        bounds = [run.facts.get(f"{metric}_interval") for run in members]
        lengths = [run.draft_length or 0 for run in members]
        traces.append(_line(number, family, lengths, values, bounds, "K=%{customdata}: %{y:.2f}"))
    layout = _layout("K, most drafts per step", "speed-up" if metric == "speedup" else "tokens per step", integers=True)
    figure = go.Figure(traces, layout)
    figure.add_hline(y=1, line={"dash": "dot", "width": 1, "color": "#888"})
    return Plot(
        "by_length",
        title,
        "Bars are 95 % intervals over prompts. At 1 speculation costs what it brings.",
        figure,
    )


def _step_time(content: Content) -> Plot:
    title = "Time of a step by part"
    runs = [run for run in content.runs if run.facts.get("time_shares") and run.facts.get("seconds")]
    if not runs:
        return Plot("step_time", title, "Stages were not timed. `--profile` draws this plot.", None)
    steps = [1000 * run.facts["seconds"] / run.facts["num_target_steps"] for run in runs]
    parts = dict.fromkeys(part for run in runs for part in run.facts["time_shares"])
    traces = [
        go.Bar(
            y=[run.label for run in runs],
            x=[step * run.facts["time_shares"].get(part, 0) for run, step in zip(runs, steps, strict=True)],
            name=part,
            orientation="h",
            hovertemplate="%{x:.2f} ms",
        )
        for part in parts
    ]
    layout = _layout("milliseconds of one request's step", "") | {"barmode": "stack", "height": 160 + 34 * len(runs)}
    layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return Plot(
        "step_time",
        title,
        "Host time; on a GPU, work waits in the stage that next needs a result.",
        go.Figure(traces, layout),
    )


def _drafts(content: Content) -> Plot:
    title = "Drafts against tokens"
    runs = _drafting(content)
    if not runs:
        return Plot("drafts", title, "Nothing was drafted.", None)
    points = [(run.label, run.facts) for run in runs]
    if len(runs) == 1:
        points = list((runs[0].facts.get("by_category") or {"all": runs[0].facts}).items())
    traces = [_points(label, [(label, facts)], "markers") for label, facts in points]  # named in the legend
    front = [(label, facts) for label, facts in points if facts.get("is_on_pareto_front")]
    if len(front) > 1:
        traces.insert(0, _points("Pareto front", sorted(front, key=lambda point: _drafted(point[1])), "lines"))
    layout = _layout("draft tokens per step", "tokens per step")
    return Plot("drafts", title, "Few drafts for many tokens is up and left.", go.Figure(traces, layout))


def _points(name: str, points: Sequence[tuple[str, Any]], mode: str) -> Any:
    return go.Scatter(
        x=[_drafted(facts) for _, facts in points],
        y=[facts["tokens_per_target_step"] for _, facts in points],
        text=[label for label, _ in points],
        name=name,
        mode=mode,
        textposition="top center",
        cliponaxis=False,
        marker={"size": 10},
        line={"dash": "dot", "width": 1},
        hovertemplate="%{text}: %{x:.2f} drafts, %{y:.2f} tokens<extra></extra>",
        hoverinfo="skip" if mode == "lines" else None,
    )


def _drafted(facts: Any) -> float:
    return float(facts["num_draft_tokens"] / facts["num_target_steps"])


def _drafting(content: Content) -> list[Run]:
    return [run for run in content.runs if run.facts.get("num_drafts")]


def _line(
    number: int,
    name: str,
    places: Sequence[int],
    values: Sequence[float],
    bounds: Sequence[Sequence[float] | None],
    hover: str,
) -> Any:
    """A run's points, a little to the right of those of the run before, with error bars where bounds are known."""
    pairs = [(bound or (value, value), value) for value, bound in zip(values, bounds, strict=True)]
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [max(high - value, 0) for (_, high), value in pairs],
        "arrayminus": [max(value - low, 0) for (low, _), value in pairs],
        "thickness": 1,
        "width": 3,
    }
    return go.Scatter(
        x=[place + BESIDE * (number % MOST_SHOWN) for place in places],
        y=values,
        customdata=list(places),
        error_y=bars,
        name=name,
        mode="lines+markers",
        visible=True if number < MOST_SHOWN else "legendonly",
        hovertemplate=hover,
    )


def _layout(x: str, y: str, *, integers: bool = False) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": x}, **({"dtick": 1} if integers else {})},
        "yaxis": {"title": {"text": y}},
        "colorway": list(COLOURS),
        "height": 380,
        "margin": {"l": 60, "r": 20, "t": 20, "b": 50},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "template": None,
    }
