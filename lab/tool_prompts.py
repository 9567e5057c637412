"""The packaged prompts that ask for a tool call or a record, each with the schema of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec.sdk import ConfigError

PROMPTS = Path(__file__).parents[1] / "assets" / "tools.json"


def rows(path: Path | None) -> Iterator[dict[str, Any]]:
    """60 prompts as rows of a custom dataset: five of each of eight tools and four kinds of record.

    path: `--dataset-path`. Raises ConfigError SD-E164 where there is one.
    """
    if path is not None:
        raise ConfigError("SD-E164", "the dataset 'tools' is packaged and takes no --dataset-path", {"found": path})
    for kind in json.loads(PROMPTS.read_text(encoding="utf-8")):
        schema = json.dumps(kind["schema"])
        for number, ask in enumerate(kind["asks"], start=1):
            yield {
                "prompt_id": f"{kind['name']}-{number}",
                "category": kind["category"],
                "prompt": f"{_task(kind)} Its JSON schema:\n{schema}\n\nUser: {ask}\nJSON: ",
                "structured_outputs": {"json": kind["schema"], "disable_any_whitespace": True},
            }


def _task(kind: dict[str, Any]) -> str:
    if kind["category"] == "tool_call":
        return f"The tool {kind['name']} {kind['does']}. Answer with a call of it."
    return f"{kind['does']} is to be read out of a text."
