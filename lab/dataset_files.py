"""The files of prompt sets, form by form. A row that cannot be used is named with its number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec.core.request.prompts import require_messages
from specdec.sdk import ConfigError
from specdec.sdk.errors import RequestError
from specdec.sdk.json_files import read_json
from specdec.sdk.structured_outputs import StructuredOutputs

NO_CATEGORY = "all"


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a set, or a conversation."""

    prompt_id: str
    category: str
    prompt: str  # of the first turn; empty where it is given in another form
    later_turns: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()  # of a prompt that is given so
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # of a prompt that is a conversation
    structured_outputs: StructuredOutputs | None = field(default=None, hash=False)  # None: what the run asks for

    @property
    def turns(self) -> tuple[str, ...]:
        """Everything that the user says, in its order."""
        return self.prompt, *self.later_turns

    def turn_id(self, turn: int) -> str:
        """The id of a turn's request: the prompt's own for the first, with the number behind it for others."""
        return self.prompt_id if turn == 0 else f"{self.prompt_id}/{turn + 1}"


FORMS = "prompt", "turns", "prompt_token_ids", "messages"
"""How a row of one's own file gives its prompt: a text, several, token ids, or a conversation for a chat template."""
_ROW_FIX = (
    'of one\'s own: {"prompt": TEXT}, {"turns": [TEXT, ...]}, {"prompt_token_ids": [1, 2]} or {"messages": [...]}'
)
Row = Mapping[str, Any]
Rows = Iterator[tuple[str, Row]]  # each with the place where it stands


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


def custom(path: Path) -> Iterator[PromptRow]:
    """Objects with one of `FORMS`, and if they like "prompt_id", "category" and "structured_outputs"."""
    for number, (where, row) in enumerate(_json_lines(path), start=1):
        yield prompt_row(row, where, number)


def prompt_row(row: Row, where: str, number: int) -> PromptRow:
    """Read a row of a custom file or of a plugin. Raises ConfigError SD-E162."""
    return replace(_prompt_row(row, where, number), structured_outputs=_structured_outputs(row, where))


def _structured_outputs(row: Row, where: str) -> StructuredOutputs | None:
    """The form of the answer, as in `SamplingParams`."""
    asked = row.get("structured_outputs")
    if asked is None:
        return None
    if not isinstance(asked, Mapping):
        raise bad_row(where, '"structured_outputs" is no object', f"{asked!r:.80}")
    try:
        return StructuredOutputs.parse(asked, where)
    except ConfigError as error:
        raise bad_row(where, f'"structured_outputs": {error.summary}', f"{asked!r:.80}") from error


def _named(row: Row, key: str, default: object) -> str:
    return str(default if row.get(key) is None else row[key])


def _prompt_row(row: Row, where: str, number: int) -> PromptRow:
    prompt_id, category = _named(row, "prompt_id", number), _named(row, "category", NO_CATEGORY)
    given = [form for form in FORMS if form in row]
    if len(given) != 1:
        raise bad_row(where, f"a row has one of {', '.join(FORMS)}", f"keys {', '.join(map(str, row)) or 'none'}")
    if given == ["prompt_token_ids"]:
        return PromptRow(prompt_id, category, "", token_ids=_token_ids(row, where))
    if given == ["messages"]:
        return PromptRow(prompt_id, category, "", messages=_messages(row, where))
    return _row(prompt_id, category, _turns(row, where) if given == ["turns"] else (_text(row, "prompt", where),))


def _token_ids(row: Row, where: str) -> tuple[int, ...]:
    ids = row["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise bad_row(where, '"prompt_token_ids" is no list of integers', f"{ids!r:.80}")
    return tuple(ids)


def _messages(row: Row, where: str) -> tuple[Mapping[str, Any], ...]:
    try:
        require_messages(row["messages"])
    except RequestError as error:
        raise bad_row(where, f'"messages": {error.summary}', f"{row['messages']!r:.80}") from error
    return tuple(row["messages"])


def _questions(path: Path) -> Iterator[PromptRow]:
    """Every turn of Spec-Bench (https://github.com/hemingkx/Spec-Bench), of MT-Bench, or of a split of SPEED-Bench.

    https://huggingface.co/datasets/nvidia/SPEED-Bench has two kinds of splits: qualitative and throughput_*.
    path: a JSONL or Parquet file, or a folder with Parquet files of one split.
    """
    is_parquet = path.is_dir() or path.suffix == ".parquet"
    for where, row in _parquet_rows(path) if is_parquet else _json_lines(path):
        turns = _turns(row, where)
        yield _row(str(_required(row, "question_id", where)), str(_required(row, "category", where)), turns)


def _humaneval(path: Path) -> Iterator[PromptRow]:
    """JSONL like HumanEval's (https://github.com/openai/human-eval): "task_id" and "prompt"."""
    for where, row in _json_lines(path):
        task_id = str(_required(row, "task_id", where))
        yield PromptRow(task_id, str(row.get("category", task_id.partition("/")[0])), _text(row, "prompt", where))


def _sharegpt(path: Path) -> Iterator[PromptRow]:
    """A JSON array of conversations, of which the user's turns are taken; the target gives its own replies.

    A turn is {"from": "human", "value": ...} or {"role": "user", "content": ...}.
    """
    for number, (where, row) in enumerate(_json_array(path), start=1):
        said = row.get("conversations", row.get("messages"))
        if not isinstance(said, list):
            raise bad_row(where, 'no list "conversations" or "messages"', f"keys {', '.join(row) or 'none'}")
        turns = [_said(each, where) for each in said if _is_users(each, where)]
        if not turns:
            raise bad_row(where, "nobody asks anything", f"{len(said)} turns")
        yield _row(str(row.get("id", number)), str(row.get("category", NO_CATEGORY)), tuple(turns))


READERS: dict[str, Callable[[Path], Iterable[PromptRow]]] = {
    "packaged": custom,
    "custom": custom,
    "spec_bench": _questions,
    "mt_bench": _questions,
    "speed_bench": _questions,
    "humaneval": _humaneval,
    "sharegpt": _sharegpt,
}
"""By the name of the set: what reads its file."""


def _row(prompt_id: str, category: str, turns: tuple[str, ...]) -> PromptRow:
    return PromptRow(prompt_id, category, turns[0], turns[1:])


def _turns(row: Row, where: str) -> tuple[str, ...]:
    turns = _required(row, "turns", where)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise bad_row(where, '"turns" is no list of texts', repr(turns)[:80])
    return tuple(turns)


def _is_users(turn: Any, where: str) -> bool:
    if not isinstance(turn, Mapping) or not {"from", "role"} & turn.keys():
        raise bad_row(where, 'a turn has neither "from" nor "role"', repr(turn)[:80])
    return turn.get("from", turn.get("role")) in ("human", "user")


def _said(turn: Row, where: str) -> str:
    return _text(turn, "value" if "value" in turn else "content", where)


def _text(row: Row, key: str, where: str) -> str:
    text = _required(row, key, where)
    if not isinstance(text, str):
        raise bad_row(where, f'"{key}" is no text', repr(text)[:80])
    return text


def _json_lines(path: Path) -> Rows:
    """Each object of a JSONL file; blank lines are skipped."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = read_json(line)
        except json.JSONDecodeError as error:
            raise bad_row(where, "not JSON", f"{error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise bad_row(where, "not a JSON object", type(row).__name__)
        yield where, row


def _json_array(path: Path) -> Rows:
    """Each object of a JSON array."""
    try:
        rows = read_json(read_text(path))
    except json.JSONDecodeError as error:
        raise bad_row(str(path), "not JSON", f"{error.msg} at line {error.lineno}") from error
    if not isinstance(rows, list):
        raise bad_row(str(path), "not a JSON array", type(rows).__name__)
    for number, row in enumerate(rows, start=1):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise bad_row(where, "not a JSON object", type(row).__name__)
        yield where, row


def _parquet_rows(path: Path) -> Rows:
    """Each row of a Parquet file, or of those in a folder. Raises ConfigError SD-E243 without pyarrow."""
    from .recording.shards import pyarrow

    pa = pyarrow()
    for file in sorted(path.glob("*.parquet")) if path.is_dir() else [path]:
        try:
            rows = pa.parquet.read_table(file).to_pylist()
        except (OSError, pa.ArrowException) as error:
            facts = {"because": error, "looked for": file.absolute()}
            raise ConfigError("SD-E161", f"cannot read {str(file)!r}", facts) from error
        yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))


def _required(row: Row, key: str, where: str) -> Any:
    if key not in row:
        raise bad_row(where, f'no key "{key}"', f"keys {', '.join(row) or 'none'}")
    return row[key]


def bad_row(where: str, problem: str, found: str) -> ConfigError:
    """The error for a row that cannot be used."""
    return ConfigError("SD-E162", f"{where}: {problem}", {"found": found, "fix": _ROW_FIX})
