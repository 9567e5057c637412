"""Write docs/reference/errors.md from the texts of `specdec explain`: python -m scripts.error_reference"""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from textwrap import fill

from specdec.sdk import errors
from specdec.sdk.explanations import Explanation, explanations

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "errors.md"
WIDTH = 120
WORD = re.compile(r"(?!(?:pyarrow|propose)\b)[a-z-]+,?")
"""What a sentence may begin with in capitals; identifiers and names of libraries keep their form."""
HEADER = """\
# Error codes

Every error and warning has a code that never changes its meaning. `specdec explain CODE` prints the same texts. This
page is written by `python -m scripts.error_reference` from `sdk/explanations/`; edit those files.
"""


def page() -> str:
    """The whole page."""
    sections = [HEADER]
    for family, members in groupby(explanations().values(), key=lambda each: each.family):
        sections += [f"## {family}\n", *map(_section, members)]
    return "\n".join(sections)


def _section(each: Explanation) -> str:
    parts = [
        f"### {each.code}",
        f"**{_as_sentence(each.title)}** ({_carrier(each.error)})",
        *(
            fill(text, WIDTH, break_on_hyphens=False)
            for text in (each.means, f"**Why it matters.** {each.why}", f"**Fix.** {each.fix}")
        ),
    ]
    parts += [f"{label}:\n\n```text\n{code}\n```" for label, code in (("Bad", each.bad), ("Good", each.good)) if code]
    return "\n\n".join(parts) + "\n"


def _as_sentence(title: str) -> str:
    """With a capital at its beginning, unless that is a name in code or of a library."""
    return title[0].upper() + title[1:] if WORD.fullmatch(title.split()[0]) else title


def _carrier(error: str) -> str:
    if error == "warning":
        return "a warning"
    return f"`{error}`, exit code {getattr(errors, error).exit_code}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
