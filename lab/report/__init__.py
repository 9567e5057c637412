"""A result as one page with plots, and its figures beside it as JSON and CSV."""

from .page import render, require_plotly, write_report, write_whole

__all__ = ["render", "require_plotly", "write_report", "write_whole"]
