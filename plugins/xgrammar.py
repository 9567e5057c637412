"""Compiles JSON schemas, expressions and grammars with xgrammar (arXiv 2411.15100), imported with the first one.

Special tokens are barred except at the end: to xgrammar they are text, which strings may contain.
"""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy

from specdec.sdk import ConfigError
from specdec.sdk.extras import INSTALL_STRUCTURED
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

DEEPEST = 64  # levels of a schema
LONGEST = 1 << 20  # characters of what is asked for
CACHE_BYTES = 256 << 20
MOST_FORCED = 256  # bytes; a grammar may force an endless text
COMPACT: dict[str, Any] = {"any_whitespace": False, "separators": (",", ":")}  # vLLM's form without whitespace


class XGrammarBackend:
    """A compiler for the vocabulary, and one for single bytes. They remember what they compiled."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ConfigError SD-E343 where the library is missing, or does not read the tokenizer."""
        import torch

        if find_spec("xgrammar") is None:
            facts = {"missing": "xgrammar", "fix": INSTALL_STRUCTURED}
            raise ConfigError("SD-E343", "structured output needs a library that is not installed", facts)
        import xgrammar

        ends = sorted(vocabulary.end_token_ids) or None  # None: the library looks for one, which is barred below
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                vocabulary.tokenizer, vocab_size=vocabulary.size, stop_token_ids=ends
            )
        except Exception as error:
            facts = {"tokenizer": type(vocabulary.tokenizer).__name__, "because": str(error)}
            raise ConfigError("SD-E343", "xgrammar does not read this tokenizer", facts) from error
        self._library: Any = xgrammar
        self._texts: list[bytes] = info.decoded_vocab
        of_bytes = xgrammar.TokenizerInfo([*(bytes([each]) for each in range(256)), b""], stop_token_ids=[256])
        self._compiler, self._byte_compiler = (
            xgrammar.GrammarCompiler(each, max_threads=1, cache_limit_bytes=CACHE_BYTES) for each in (info, of_bytes)
        )
        self._ordinary = torch.zeros(vocabulary.num_words, dtype=torch.int32)
        words = self._ordinary.numpy().view("uint32")
        for token_id in {*vocabulary.tokenizer.all_special_ids, *info.stop_token_ids} - vocabulary.end_token_ids:
            if token_id < vocabulary.size:  # a tokenizer may have more than the model
                words[token_id // 32] |= 1 << token_id % 32
        self._ordinary.bitwise_not_()

    def compile(self, asked: StructuredOutputs) -> CompiledGrammar:
        """Raises ValueError for what the library does not read."""
        if asked.whitespace_pattern is not None:
            raise ValueError("xgrammar has no whitespace_pattern; disable_any_whitespace fixes whitespace")
        try:
            compiled = _compiled(self._compiler, asked)
            names_tokens = "Token(" in str(compiled.grammar)  # by their ids, which mean nothing to bytes
            of_bytes = None if names_tokens else _compiled(self._byte_compiler, asked)
        except RuntimeError as error:  # the library's own word for what it does not read
            raise ValueError(str(error)) from error
        return CompiledGrammar(self._library, compiled, of_bytes, self._texts, self._ordinary)


@dataclass(frozen=True)
class CompiledGrammar:
    """A grammar as the library compiled it, for any number of texts."""

    library: Any
    compiled: Any
    of_bytes: Any  # the same, compiled for single bytes. None: no forced text is known
    texts: Sequence[bytes]  # of tokens
    ordinary: Tensor  # [num_words] int32, 0 at special tokens

    def start(self) -> MatcherState:
        """Before the first token."""
        return MatcherState(self)


class MatcherState:
    """Where one text stands in its grammar."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        matcher, of_bytes = grammar.library.GrammarMatcher, grammar.of_bytes
        self._matcher = matcher(grammar.compiled)
        self._of_bytes: Any = None if of_bytes is None else matcher(of_bytes)
        self._texts, self._ordinary = grammar.texts, grammar.ordinary
        self._token_ids: list[int] = []
        self._num_followed = 0  # of these, by the matcher of bytes

    @property
    def has_ended(self) -> bool:
        """Whether an end of sequence was accepted."""
        return bool(self._matcher.is_terminated())

    @property
    def may_end(self) -> bool:
        """Whether the text is complete as it stands."""
        return bool(self._matcher.is_completed())

    def accept(self, token_id: int) -> bool:
        """Go on by a token, unless it is barred or refused."""
        is_ordinary = int(self._ordinary[token_id // 32]) >> token_id % 32 & 1
        if not is_ordinary or not self._matcher.accept_token(token_id):
            return False
        self._token_ids.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        self._matcher.rollback(num_tokens)
        num_left = len(self._token_ids) - num_tokens
        del self._token_ids[num_left:]
        if self._num_followed > num_left:
            self._of_bytes.rollback(self._num_followed - num_left)
            self._num_followed = num_left

    def fill(self, words: Tensor) -> None:
        """Write which tokens may follow."""
        words.fill_(-1)  # the library leaves rows alone where everything is allowed
        self._matcher.fill_next_token_bitmask(words[None])
        words.bitwise_and_(self._ordinary)

    def forced(self) -> str:
        """The text that must follow, of `MOST_FORCED` bytes at most. The library's own search for it has no bound."""
        if self._of_bytes is None:
            return ""
        for token_id in self._token_ids[self._num_followed :]:
            self._of_bytes.accept_string(self._texts[token_id])
        self._num_followed = len(self._token_ids)
        found, words = bytearray(), numpy.empty((1, 9), numpy.int32)  # bytes and an end
        while len(found) < MOST_FORCED and self._of_bytes.fill_next_token_bitmask(words):  # False: anything may follow
            bits = int.from_bytes(words, "little")
            if bits.bit_count() != 1 or bits >> 256:  # a choice, or the end
                break
            found.append(bits.bit_length() - 1)
            self._of_bytes.accept_token(found[-1])
        self._of_bytes.rollback(len(found))
        try:
            return getincrementaldecoder("utf-8")().decode(found)  # without an end within a character
        except UnicodeDecodeError:  # it begins within one
            return ""


def _compiled(compiler: Any, asked: StructuredOutputs) -> Any:
    whitespace = COMPACT if asked.disable_any_whitespace else {}
    if asked.json_schema is not None:
        return compiler.compile_json_schema(_json_text(asked.json_schema, "json"), **whitespace)
    if asked.json_object:
        return compiler.compile_json_schema('{"type": "object"}', strict_mode=False, **whitespace)
    if asked.regex is not None:
        return compiler.compile_regex(_bounded(asked.regex))
    if asked.choice:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        return compiler.compile_grammar(_bounded(f"root ::= {texts}"))
    if asked.grammar is not None:
        return compiler.compile_grammar(_bounded(asked.grammar))
    assert asked.structural_tag is not None, "StructuredOutputs requires one of its kinds"
    return compiler.compile_structural_tag(_json_text(asked.structural_tag, "structural_tag"))


def _bounded(text: str) -> str:
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters, and {LONGEST} is the most")
    return text


def _json_text(value: str | dict[str, Any], name: str) -> str:
    """A JSON value as a text. Raises ValueError for what is none, or is nested too deeply."""
    try:
        parsed = json.loads(_bounded(value)) if isinstance(value, str) else value
        text = json.dumps(parsed)
    except (RecursionError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} is not JSON: {type(error).__name__}: {error}") from error
    depth, level = 0, [parsed]
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"{name} has more than {DEEPEST} levels")
        level = [inner for each in level for inner in _inside(each)]
    return _bounded(text)


def _inside(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return list(inner)
