"""Prompt sets: the packaged one, Spec-Bench's file, files of one's own, and those that plugins register."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from specdec.core.config.settings_text import read_json
from specdec.core.registry import PluginSettings
from specdec.core.registry.hooks import load_hooks
from specdec.sdk import ConfigError
from specdec.sdk.errors import did_you_mean

PACKAGED_PROMPTS = Path(__file__).parents[1] / "assets" / "tiny" / "prompts.jsonl"
NO_CATEGORY = "all"


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a set."""

    prompt_id: str
    category: str
    prompt: str  # of the first turn
    later_turns: tuple[str, ...] = ()

    @property
    def turns(self) -> tuple[str, ...]:
        """Everything that the user says, in its order."""
        return self.prompt, *self.later_turns


def decode_utf8(data: bytes, where: str) -> str:
    """The text of `data`, without a byte order mark. Raises ConfigError SD-E160 with the position of a bad byte."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        facts = {
            "position": f"byte {error.start} (0x{data[error.start]:02x}), line {line}: {error.reason}",
            "fix": "convert it, for example: iconv -f latin1 -t utf-8",
        }
        raise ConfigError("SD-E160", f"{where} is not UTF-8 text", facts) from error


def read_text(path: Path) -> str:
    """A file's UTF-8 text. Raises ConfigError SD-E160 or SD-E161 (cannot be read)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        facts = {"because": error.strerror, "looked for": path.absolute()}
        raise ConfigError("SD-E161", f"cannot read {str(path)!r}", facts) from error
    return decode_utf8(data, str(path))


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: "prompt" of each object in a .jsonl, else each line that is not blank."""
    if path.suffix == ".jsonl":
        prompts = [row.prompt for row in _custom(path)]
    else:
        prompts = [line for line in read_text(path).splitlines() if line.strip()]
    if not prompts:
        raise ConfigError("SD-E163", f"{str(path)!r} holds no prompt")
    return prompts


def load_dataset(name: str, path: Path | None, plugins: PluginSettings | None = None) -> list[PromptRow]:
    """All rows of a prompt set, in its order: ours, or one that a hook plugin registers. Ours load no plugin.

    Raises ConfigError: SD-E132 (no such set), SD-E160, SD-E161 (the file), SD-E162 (a row), SD-E163 (empty), SD-E164
    (no or a needless path); PluginLoadError SD-E118 if a plugin's set fails.
    """
    if name not in _READERS:
        rows = list(_registered(name, path, plugins or PluginSettings()))
    elif (path is None) != (name == "packaged"):
        facts = {"packaged": "needs no --dataset-path", "spec_bench, custom": "need one"}
        raise ConfigError("SD-E164", f"the dataset {name!r} and --dataset-path do not go together", facts)
    else:
        rows = list(_READERS[name](path or PACKAGED_PROMPTS))
    where = str(path or f"dataset {name}")
    if not rows:
        raise ConfigError("SD-E163", f"{where!r} holds no prompt")
    _refuse_repeated_ids(rows, where)
    return rows


def _registered(name: str, path: Path | None, plugins: PluginSettings) -> Iterator[PromptRow]:
    """The rows that a plugin's callable gives: objects like the lines of a custom file."""
    sets = load_hooks(plugins).offered("register_datasets", "dataset")
    if name not in sets:
        offered = [*_READERS, *sets]
        meant = did_you_mean(name, offered)
        facts = ({"did you mean": meant} if meant else {}) | {"offered": ", ".join(offered)}
        raise ConfigError("SD-E132", f"there is no dataset {name!r}", facts)
    with sets[name].attributed():
        rows = list(sets[name].value(path))
    for number, row in enumerate(rows, start=1):
        where = f"dataset {name}, row {number}"
        if not isinstance(row, Mapping):
            raise _bad_line(where, "not an object", f"{type(row).__name__}: {row!r:.80}")
        yield _prompt_row(row, where, number)


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


def _spec_bench(path: Path) -> Iterator[PromptRow]:
    """Spec-Bench's question.jsonl (https://github.com/hemingkx/Spec-Bench); of several turns the first."""
    for where, row in _json_lines(path):
        turns = _required(row, "turns", where)
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise _bad_line(where, '"turns" is no list of texts', repr(turns)[:80])
        question_id, category = _required(row, "question_id", where), _required(row, "category", where)
        yield PromptRow(str(question_id), str(category), turns[0])


def _custom(path: Path) -> Iterator[PromptRow]:
    """Objects with "prompt" and, if they like, "prompt_id" and "category"."""
    for number, (where, row) in enumerate(_json_lines(path), start=1):
        yield _prompt_row(row, where, number)


def _prompt_row(row: Mapping[str, Any], where: str, number: int) -> PromptRow:
    prompt = _required(row, "prompt", where)
    if not isinstance(prompt, str):
        raise _bad_line(where, '"prompt" is no text', repr(prompt)[:80])
    return PromptRow(str(row.get("prompt_id", number)), str(row.get("category", NO_CATEGORY)), prompt)


_READERS: dict[str, Callable[[Path], Iterable[PromptRow]]] = {
    "packaged": _custom,
    "spec_bench": _spec_bench,
    "custom": _custom,
}


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a JSONL file with the place where it stands; blank lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = read_json(line)
        except json.JSONDecodeError as error:
            raise _bad_line(where, "not JSON", f"{error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise _bad_line(where, "not a JSON object", type(row).__name__)
        yield where, row


def _required(row: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in row:
        raise _bad_line(where, f'no key "{key}"', f"keys {', '.join(row) or 'none'}")
    return row[key]


def _bad_line(where: str, problem: str, found: str) -> ConfigError:
    return ConfigError("SD-E162", f"{where}: {problem}", {"found": found})


def _refuse_repeated_ids(rows: Sequence[PromptRow], where: str) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.prompt_id in seen:
            raise ConfigError("SD-E162", f"{where}: two prompts have the id {row.prompt_id!r}")
        seen.add(row.prompt_id)
