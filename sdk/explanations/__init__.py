"""What every error and warning code means: one TOML file per family, the source of `specdec explain` and the docs."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from textwrap import fill, indent

FAMILIES = (
    "loading",
    "configuration",
    "checkpoints",
    "target",
    "requests",
    "running",
    "elsewhere",
    "bench",
    "recordings",
)
EXAMPLES = ("bad", "good")
WIDTH = 96


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The long text of one code. Texts are plain English with code in backticks; examples are code."""

    code: str
    family: str
    title: str
    error: str  # the class that carries the code, or "warning"
    means: str
    why: str  # it matters
    fix: str
    bad: str | None = None
    good: str | None = None

    @property
    def text(self) -> str:
        """The explanation as a terminal shows it."""
        prose = {"means": self.means, "why": self.why, "fix": self.fix}
        sections = {label: fill(text, WIDTH) for label, text in prose.items()} | {"bad": self.bad, "good": self.good}
        texts = [f"{label}\n{indent(text, '  ')}" for label, text in sections.items() if text]
        return "\n\n".join([f"{self.code}  {self.title}   [{self.error}]", *texts])


@cache
def explanations() -> dict[str, Explanation]:
    """All of them by code, one family after the other."""
    found: dict[str, Explanation] = {}
    for name in FAMILIES:
        codes = tomllib.loads(files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
        family = codes.pop("family")
        for code, entry in codes.items():
            prose = {key: " ".join(text.split()) for key, text in entry.items() if key not in EXAMPLES}
            examples = {key: text.strip("\n") for key, text in entry.items() if key in EXAMPLES}
            found[code] = Explanation(code=code, family=family, **prose, **examples)
    return found
