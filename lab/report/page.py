"""Writes a report: one page that needs no network, and the same figures as JSON and CSV beside it."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.sdk import ConfigError

from ..equality import Outputs
from .content import NAMES, Content, Run, acceptance_rows, content_of, figure_of, figure_rows, name_of

HERE = Path(__file__).parent
MOST_TOKENS = 1_000_000  # drafted or put out, of all token views of a page


def require_plotly() -> None:
    """Raises ConfigError SD-E255 where plotly is not installed."""
    if find_spec("plotly") is None:
        facts = {"missing": "plotly", "fix": 'pip install "specdec-sdk[lab]"'}
        raise ConfigError("SD-E255", "a report has plots, and their library is not installed", facts)


def files_of(path: Path) -> list[Path]:
    """The files of a report whose page is `path`: the page first, and what lies beside it."""
    return [path, *(path.with_suffix(each) for each in (".json", ".csv", ".acceptance.csv"))]


def write_report(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Write the page, and beside it its result as JSON, its figures as CSV and acceptance as speculators has it.

    result: of `bench`, `compare`, `replay` or `why`. Returns the files written. Raises ConfigError SD-E255 without
    plotly, OSError.
    """
    require_plotly()
    content = content_of(result)
    page, data, table, acceptance = files_of(path)
    write_whole(page, render(content))
    write_whole(data, json.dumps(result, ensure_ascii=False))
    write_whole(table, _csv(figure_rows(content)))
    write_whole(acceptance, _csv(acceptance_rows(content)))
    return [page, data, table, acceptance]


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and then put it there, so that an earlier one stays if this fails. Raises OSError.

    What is no file, such as a pipe, and a file in a directory that cannot be written are written to. Names of files may
    hold bytes that are no text: they are escaped as JSON escapes them.
    """
    place = path.resolve()
    if (path.exists() and not path.is_file()) or not os.access(place.parent, os.W_OK):
        path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
        return
    part = place.with_name(f".{place.name}.{os.getpid()}.tmp")  # a name that no file of the user has
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")
        os.replace(part, place)
    finally:
        part.unlink(missing_ok=True)


def render(content: Content) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from plotly.offline import get_plotlyjs
    from plotly.utils import PlotlyJSONEncoder

    from .plots import plots

    found = plots(content)
    drawn = [plot for plot in found if plot.figure is not None]
    figures = [{"name": plot.name, "figure": plot.figure} for plot in drawn]
    viewed = _viewed(content.runs)
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.j2").render(
        content=content,
        plots=drawn,
        missing=[f"{plot.title}: {plot.note}" for plot in found if plot.figure is None],
        tiles=_tiles(content.runs),
        rows=_figures(content),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["specdec", *sys.argv[1:]]) if Path(sys.argv[0]).name == "specdec" else None,
        settings=_flat(content.configuration),
        environment=_flat(content.environment),
        viewed=viewed,
        not_viewed=len([run for run in content.runs if run.requests]) - len(viewed),
        figures_json=_json(figures, PlotlyJSONEncoder),
        texts_json=_json(content.token_texts),
        requests_json=[_json([_view(each) for each in run.requests]) for run in viewed],
        plotly_js=get_plotlyjs(),
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
    )


def _figures(content: Content) -> list[dict[str, Any]]:
    """The figures that have a name for people; the CSV has all of them."""
    rows = figure_rows(content)
    names = [name for name in rows[0] if name in NAMES or name in ("proposer", "category")]
    return [{name_of(name): figure_of(name, row[name]) for name in names} for row in rows]


def _viewed(runs: Sequence[Run]) -> list[Run]:
    """The runs whose texts can be looked at, the first ones: a page of all of them could grow too large to open."""
    viewed: list[Run] = []
    room = MOST_TOKENS
    for run in runs:
        room -= sum(len(each["output_token_ids"]) + sum(each["per_step_drafted"]) for each in run.requests)
        if run.requests and (room >= 0 or not viewed):
            viewed.append(run)
    return viewed


def _view(request: Mapping[str, Any]) -> list[Any]:
    """What the token view needs of a request: a list, because its keys would be most of a large page."""
    return [
        request["prompt_id"],
        request["category"],
        request["output_token_ids"],
        request["per_step_draft_token_ids"],
        request["per_step_accepted"],
        request.get("misses") or [],
        request.get("output_probabilities") or [],
        request.get("per_step_draft_parents") or [],
    ]


def _tiles(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """The figures at the head of the page, of the first run: what it says, its value, a remark."""
    facts = runs[0].facts
    tiles = []
    if facts.get("speedup") is not None:
        low, high = facts.get("speedup_interval") or (None, None)
        tiles.append(("Speed-up", f"{facts['speedup']:.2f}x", f"95 %: {low:.2f}-{high:.2f}" if low is not None else ""))
    tiles.append(("Tokens per target step", f"{facts['tokens_per_target_step']:.2f}", "all steps"))
    if facts["num_drafts"]:
        tiles.append(("Acceptance length", f"{facts['mean_acceptance_length']:.2f}", "drafted steps"))
        counts = f"{facts['num_accepted_tokens']} of {facts['num_draft_tokens']}"
        tiles.append(("Draft acceptance", f"{100 * facts['draft_acceptance_rate']:.1f} %", counts))
    if facts.get("outputs_equal") is not None:
        outputs = Outputs(facts["outputs_equal"], runs[0].temperature, facts.get("speculative_config"))
        remark = "in distribution as plain decoding's" if outputs.are_drawn_anew else "to plain decoding's"
        tiles.append(("Outputs", outputs.word, remark))
    return tiles


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted names."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "-" if value is None else str(value)
    return flat


def _json(value: Any, encoder: type[json.JSONEncoder] | None = None) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(value, cls=encoder, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
