"""The index on disk: a safetensors file, so it is mapped into memory and shared between processes, not read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from specdec.sdk import Refusal

from .index import CorpusIndex

logger = logging.getLogger("specdec")

FORMAT = "specdec-plugin-retrieval"
VERSION = "1"  # of the file; changes whenever an older reader would misread it
DEPTH = 16


def open_or_build(index: Path, corpus: Path | None, pattern: str, tokenizer: Any) -> CorpusIndex:
    """The index in that file, or if there is none, the index of the corpus, written there first.

    Raises Refusal with the file's name if it cannot be used with this tokenizer, or if there is nothing to build from.
    """
    if tokenizer is None:
        raise Refusal(
            "the target has no tokenizer, and token ids mean nothing without one", "a target with a tokenizer"
        )
    if not index.is_file():
        if corpus is None:
            raise Refusal(f"there is no index {str(index)!r}", '"corpus": a folder of texts to build it from')
        build(index, corpus, pattern, tokenizer)
    return open_index(index, tokenizer)


def build(index: Path, corpus: Path, pattern: str, tokenizer: Any) -> None:
    """Write the index of every UTF-8 file below `corpus` that matches. Raises Refusal if there is none."""
    paths = [corpus] if corpus.is_file() else sorted(path for path in corpus.glob(pattern) if path.is_file())
    texts = [text for path in paths if (text := _text(path)) is not None]
    if not texts:
        raise Refusal(f"no text below {str(corpus)!r} matches {pattern!r}", "another corpus or pattern")
    logger.warning("building %s from %d files in %s", index, len(texts), corpus)
    documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    built = CorpusIndex.build(documents, DEPTH)
    header = {"format": FORMAT, "version": VERSION, "tokenizer": fingerprint(tokenizer), "depth": str(built.depth)}
    index.parent.mkdir(parents=True, exist_ok=True)
    unfinished = index.with_name(f"{index.name}.{os.getpid()}")
    save_file({"tokens": built.tokens, "places": built.places}, unfinished, metadata=header)
    unfinished.replace(index)  # at once: nobody ever opens half an index


def open_index(index: Path, tokenizer: Any) -> CorpusIndex:
    """Map an index file into memory. Raises Refusal with its name if it is not an index of this tokenizer's ids."""
    rebuild = "delete it and give the corpus again, or name another file"
    try:
        with safe_open(index, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise Refusal(f"{str(index)!r} is damaged or no index: {error}", rebuild) from error
    expected = {"format": FORMAT, "version": VERSION, "tokenizer": fingerprint(tokenizer)}
    for key, value in expected.items():
        if header.get(key) != value:
            raise Refusal(f"{str(index)!r} has {key} {header.get(key)!r}, and {value!r} is needed", rebuild)
    return CorpusIndex(tensors["tokens"], tensors["places"], int(header["depth"]))


def fingerprint(tokenizer: Any) -> str:
    """Hash what every token id means."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
