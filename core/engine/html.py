"""Outputs as HTML, which notebooks show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

FIGURES = ("mean_acceptance_length", "tokens_per_target_step", "draft_acceptance_rate")


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = ()) -> str:
    """A table of texts and numbers."""
    heads = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{heads}</tr></thead>' if heads else ''}<tbody>{body}</tbody></table>"


def text_block(text: str) -> str:
    """A text with its line breaks."""
    style = "white-space:pre-wrap;text-align:left;margin:4px 0"
    return f'<pre style="{style}">{escape(text)}</pre>'


def acceptance(metrics: Mapping[str, Any]) -> str:
    """One line of a request's figures."""
    figures = (f"{name.replace('_', ' ')} {_cell(metrics[name])}" for name in FIGURES)
    counts = f"{metrics['num_accepted_draft_tokens']} of {metrics['num_draft_tokens']} draft tokens accepted"
    return f"<small>{', '.join((*figures, counts))}</small>"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
