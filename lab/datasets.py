"""Prompt sets: the packaged one, files of known forms, files of one's own, and those of the group `specdec.datasets`.

A function there is called with `--dataset-path`, a Path or None. It gives objects that have "prompt", and optionally
"prompt_id", "category" and "structured_outputs".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from specdec.core.registry import PluginSettings
from specdec.core.registry.functions import call_offered
from specdec.sdk import ConfigError
from specdec.sdk.errors import did_you_mean

from .dataset_files import NO_CATEGORY, READERS, PromptRow, bad_row, custom, prompt_row, read_text

PACKAGED_PROMPTS = Path(__file__).parents[1] / "assets" / "tiny" / "prompts.jsonl"


def read_prompts(path: Path) -> list[PromptRow]:
    """Read the prompts of a file: each object in a .jsonl as in a custom dataset, else each line that is not blank.

    Lines end at a line feed alone: a form feed or U+2028 is part of a prompt.
    """
    if path.suffix == ".jsonl":
        prompts = list(custom(path))
    else:
        lines = (line.removesuffix("\r") for line in read_text(path).split("\n"))
        prompts = [prompt_of(line) for line in lines if line.strip()]
    if not prompts:
        raise ConfigError("SD-E163", f"{str(path)!r} holds no prompt")
    return prompts


def prompt_of(text: str) -> PromptRow:
    """A text of one's own."""
    return PromptRow("", NO_CATEGORY, text)


def load_dataset(name: str, path: Path | None, plugins: PluginSettings | None = None) -> list[PromptRow]:
    """All rows of a prompt set, in its order: ours, or one that a distribution offers. Ours load no plugin.

    Raises ConfigError: SD-E132 (no such set), SD-E160, SD-E161 (the file), SD-E162 (a row), SD-E163 (empty), SD-E164
    (no or a needless path); PluginLoadError SD-E118 if a plugin's set fails.
    """
    if name not in READERS:
        rows = list(_offered(name, path, plugins or PluginSettings()))
    elif (path is None) != (name == "packaged"):
        facts = {"packaged": "needs no --dataset-path", "all others": "need one"}
        raise ConfigError("SD-E164", f"the dataset {name!r} and --dataset-path do not go together", facts)
    else:
        rows = list(READERS[name](path or PACKAGED_PROMPTS))
    where = str(path or f"dataset {name}")
    if not rows:
        raise ConfigError("SD-E163", f"{where!r} holds no prompt")
    _require_ids(rows, where)
    return rows


def _offered(name: str, path: Path | None, plugins: PluginSettings) -> Iterator[PromptRow]:
    """The rows of a distribution's function: objects like the lines of a custom file."""
    rows: list[object] = call_offered("datasets", name, path, list, plugins, READERS)
    for number, row in enumerate(rows, start=1):
        where = f"dataset {name}, row {number}"
        if not isinstance(row, Mapping):
            raise bad_row(where, "not an object", f"{type(row).__name__}: {row!r:.80}")
        yield prompt_row(row, where, number)


def of_category(rows: Sequence[PromptRow], category: str | None) -> list[PromptRow]:
    """The rows of one category, or all. Raises ConfigError SD-E165 if there is no such category."""
    chosen = [row for row in rows if category in (None, row.category)]
    if not chosen:
        known = dict.fromkeys(row.category for row in rows)
        facts: dict[str, object] = {"found": ", ".join(known)}
        meant = did_you_mean(str(category), known)
        raise ConfigError(
            "SD-E165", f"no prompt is of the category {category!r}", facts | ({"did you mean": meant} if meant else {})
        )
    return chosen


def spread(rows: Sequence[PromptRow], count: int) -> list[PromptRow]:
    """`count` rows taken in turn from each category (0: all of them), grouped by category."""
    groups: dict[str, list[PromptRow]] = {}
    for row in rows:
        groups.setdefault(row.category, []).append(row)
    in_turn = [row for row in chain.from_iterable(zip_longest(*groups.values())) if row is not None]
    chosen = set(in_turn[: count or None])
    return [row for group in groups.values() for row in group if row in chosen]


def _require_ids(rows: Sequence[PromptRow], where: str) -> None:
    """Raise ConfigError SD-E162 for an id that repeats, and for an id or a category that is no Unicode text."""
    seen: set[str] = set()
    for number, row in enumerate(rows, start=1):
        if any("\ud800" <= each <= "\udfff" for each in row.prompt_id + row.category):  # no file can hold them
            facts = {"found": ascii((row.prompt_id, row.category)), "fix": "Unicode text, without lone surrogates"}
            raise ConfigError("SD-E162", f"{where}, prompt {number}: its id or category is no Unicode text", facts)
        for turn in range(len(row.turns)):
            request_id = row.turn_id(turn)
            if request_id in seen:
                facts = {"fix": 'give each prompt a "prompt_id" of its own; turn 2 of a prompt "a" has the id "a/2"'}
                raise ConfigError("SD-E162", f"{where}: two prompts have the id {request_id!r}", facts)
            seen.add(request_id)
