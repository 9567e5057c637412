"""What a report says, whichever command made the result: runs with their figures, requests and settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..result import places, signed

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One proposer on one target and data set."""

    label: str
    facts: Facts
    temperature: float = 0.0

    @property
    def draft_length(self) -> int | None:
        """K, where the settings say it."""
        length = (self.facts.get("speculative_config") or {}).get("num_speculative_tokens")
        return int(length) if length is not None else None

    @property
    def family(self) -> str:
        """What runs that differ in K only have in common."""
        words = [word for word in self.label.split(" ") if not word.startswith("K=")]
        return " ".join(words)

    @property
    def requests(self) -> Sequence[Facts]:
        """The rows of the prompts. Empty if they were not kept."""
        found: Sequence[Facts] = self.facts.get("requests") or ()
        return found


@dataclass(frozen=True)
class Content:
    """Everything on a page."""

    title: str
    runs: Sequence[Run]
    configuration: Facts
    environment: Facts
    token_texts: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[Facts] = ()  # further tables: a title, columns and rows
    times: str | None = None  # how times came about, as a sentence


TITLES = {"bench": "Benchmark", "compare": "Comparison", "replay": "Replay", "why": "Why drafts were rejected"}


def content_of(result: Facts) -> Content:
    """The page of a result of `bench`, `compare`, `replay` or `why`."""
    kind = result.get("kind", "bench")
    cells = result.get("cells") or [result]
    texts: dict[str, str] = {}
    for cell in cells:
        texts |= cell.get("token_texts") or {}
    named = list(zip(places(cells), cells, strict=True))
    settings = {place: cell["configuration"] for place, cell in named} if len(cells) > 1 else cells[0]["configuration"]
    return Content(
        title=f"{TITLES[kind]}: {', '.join(dict.fromkeys(str(cell['configuration']['model']) for cell in cells))}",
        runs=[run for place, cell in named for run in _runs(cell, f" · {place}" if len(cells) > 1 else "")],
        configuration=settings,
        environment=cells[0]["environment"],
        token_texts=texts,
        sections=[*_all_sections(cells)],
        times=PREDICTED if any(cell["configuration"].get("times") == "predicted" for cell in cells) else None,
    )


PREDICTED = "Times are predicted from a recording: the recorded cost of a step, and the proposer's measured time."


def _all_sections(cells: Sequence[Facts]) -> Iterator[Facts]:
    for place, cell in zip(places(cells), cells, strict=True):
        yield from difference_sections(cell, place)
    rows: list[Facts] = []
    for cell in cells:
        rows += cell.get("rows") or [{**cell, "label": "this run", **cell["configuration"]}]
    if any(row.get("speculative_config") for row in rows):
        yield _settings_section(rows)
    for row in rows:
        yield from why_sections(row)


def difference_sections(cell: Facts, place: str) -> Iterator[Facts]:
    """How far each row is from the best, on the same prompts; none where nothing was compared."""
    rows = [row for row in cell.get("rows") or () if row.get("difference_to_best") is not None]
    if len(rows) < 2:
        return
    by = cell["configuration"]["sort"]
    shown = [[rows[0]["label"], "best", "", ""]]
    for row in rows[1:]:
        between, told = "unknown", "unknown"
        if row["difference_to_best_interval"]:
            low, high = row["difference_to_best_interval"]
            between, told = " to ".join(signed(by, low, high)), "no: 0 is inside" if low <= 0 <= high else "yes"
        shown.append([row["label"], *signed(by, row["difference_to_best"]), between, told])
    columns = ["proposer", f"{NAMES.get(by, by)}, to the best", "95 % interval, paired", "told apart"]
    yield {"title": f"Differences on the same prompts: {place}", "columns": columns, "rows": shown}


def _settings_section(rows: Sequence[Facts]) -> Facts:
    """List the settings and the source of each variant, so that two versions under one name differ."""
    shown = []
    for row in rows:
        settings = dict(row.get("speculative_config") or {})
        options = settings.pop("proposer_config", None)
        texts = [json.dumps(each, ensure_ascii=False) if each else "" for each in (settings, options)]
        shown.append([row["label"], str(row.get("proposer") or ""), *texts, (row.get("source_sha256") or "")[:12]])
    columns = ["run", "proposer", "settings", "proposer_config", "source, SHA-256"]
    return {"title": "Who drafted, and how", "columns": columns, "rows": shown, "wraps": True}


def _runs(cell: Facts, where: str) -> Iterator[Run]:
    if "rows" not in cell:
        run = cell["configuration"]
        length = (run.get("speculative_config") or {}).get("num_speculative_tokens")
        label = f"{run['proposer']} K={length}" if run["proposer"] else "plain decoding"
        yield Run(label, {**cell, "speculative_config": run.get("speculative_config")}, run.get("temperature", 0.0))
        return
    for row in cell["rows"]:
        yield Run(row["label"] + where, row, cell["configuration"].get("temperature", 0.0))


HEADS = {
    "position": "Draft position",
    "entropy": "Entropy of the target, nats",
    "context_length": "Tokens before it",
    "category": "Category",
    "token_class": "The target's token",
}
"""What the tables of `why` sum up by."""


def why_sections(row: Facts) -> Iterator[Facts]:
    """The tables of a row of `why`; none for other rows."""
    for name, kinds in (row.get("summary") or {}).items():
        columns = [HEADS[name], *map(name_of, next(iter(kinds.values()), {}))]
        rows = [[kind, *(figure_of(key, value) for key, value in tally.items())] for kind, tally in kinds.items()]
        yield {"title": f"{row['label']}: by {HEADS[name].lower()}", "columns": columns, "rows": rows}
    if row.get("trees"):
        facts = {**row["losses"], **row["trees"], "distributions": row["proposer_distributions"]}
        rows = [[name_of(name), figure_of(name, value)] for name, value in facts.items()]
        yield {"title": f"{row['label']}: losses and trees", "columns": ["", ""], "rows": rows}
    contexts = row.get("costliest_contexts")
    if contexts:
        quoted = ({**each, "drafted": _quoted(each["drafted"]), "target": _quoted(each["target"])} for each in contexts)
        rows = [[figure_of(name, value) for name, value in each.items()] for each in quoted]
        yield {"title": f"{row['label']}: costliest contexts", "columns": [*map(name_of, contexts[0])], "rows": rows}


NAMES = {
    "speedup": "speed-up",
    "tokens_per_second": "tokens per second",
    "tokens_per_target_step": "tokens per step",
    "mean_acceptance_length": "acceptance length",
    "draft_acceptance_rate": "drafts accepted",
    "num_target_steps": "target steps",
    "num_drafts": "drafted steps",
    "num_draft_tokens": "draft tokens",
    "num_accepted_tokens": "accepted tokens",
    "lost_draft_tokens": "draft tokens thrown away",
    "break_even_rows_per_step": "break-even, rows per step",
}
"""How figures are called on the page, where their names are not words already."""


def name_of(name: str) -> str:
    """The name of a figure as people read it."""
    return NAMES.get(name, name.replace("_", " "))


def figure_of(name: str, value: Any) -> Any:
    """A share in percent, a speed-up with its sign, other fractions with three digits."""
    if not isinstance(value, float):
        return value
    if any(part in name for part in ("rate", "share", "probability", "acceptance_at")):
        return f"{value:.1%}"
    return f"{value:.2f}x" if name.startswith("speedup") else f"{value:.4g}"


def _quoted(text: str) -> str:
    """Quote a text so that blanks and line breaks can be seen."""
    return json.dumps(text, ensure_ascii=False)


FIGURES = (
    "speedup",
    "speedup_low",
    "speedup_high",
    "difference_to_best",
    "difference_to_best_low",
    "difference_to_best_high",
    "tokens_per_second",
    "tokens_per_target_step",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "num_output_tokens",
    "num_target_steps",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "break_even_rows_per_step",
    "tree_nodes",
    "tree_depth",
    "tree_width",
    "tree_accepted_depth",
    "tree_wasted_nodes",
)


def figure_rows(content: Content) -> list[dict[str, Any]]:
    """All figures as a table: a row for each run and for each of its categories. Positions count from 0."""
    rows = []
    for run in content.runs:
        parts: dict[str, Any] = {"all": run.facts} | dict(run.facts.get("by_category") or {})
        for category, facts in parts.items():
            values = {**facts}
            for name in ("speedup", "difference_to_best"):
                low, high = facts.get(f"{name}_interval") or (None, None)
                values |= {f"{name}_low": low, f"{name}_high": high}
            values |= {f"tree_{name}": value for name, value in (facts.get("drafted_trees") or {}).items()}
            row: dict[str, Any] = {"proposer": run.label, "category": category}
            row |= {name: values.get(name) for name in FIGURES}
            rates = enumerate(facts.get("acceptance_per_position") or ())
            rows.append(row | {f"acceptance_at_pos_{position}": rate for position, rate in rates})
    known = [
        name
        for name in dict.fromkeys(key for row in rows for key in row)
        if any(row.get(name) is not None for row in rows)
    ]
    return [{name: row.get(name) for name in known} for row in rows]


def acceptance_rows(content: Content) -> list[dict[str, Any]]:
    """The rows of `acceptance.csv` as speculators' evaluation writes it; a subset is a proposer on a category."""
    rows = []
    for run in content.runs:
        for category, facts in (dict(run.facts.get("by_category") or {}) or {"all": run.facts}).items():
            row: dict[str, Any] = {"subset": category if len(content.runs) == 1 else f"{run.label}/{category}"}
            row |= {name: facts[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")}
            row["acceptance_length"] = facts["mean_acceptance_length"]
            rates = enumerate(facts["acceptance_per_position"])
            rows.append(row | {f"acceptance_at_pos_{position}": rate for position, rate in rates})
    return rows
