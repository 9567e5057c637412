"""Compiles the grammars that requests ask for. No backend is loaded before the first of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from weakref import WeakValueDictionary

from specdec.sdk.errors import RequestError, message
from specdec.sdk.structured_outputs import GrammarBackend, StructuredOutputs, Vocabulary

from ..registry import PluginSettings
from ..registry.attribution import describe
from ..registry.functions import call_offered
from ..request.grammar import RequestGrammar

logger = logging.getLogger("specdec")


class Grammars:
    """The grammars of an engine's requests."""

    def __init__(self, backend: str, vocabulary: Vocabulary, plugins: PluginSettings, most_seconds: float = 10) -> None:
        """backend: its name in the entry-point group `specdec.grammars`. most_seconds: of compiling one grammar."""
        self._name, self._most_seconds = backend, most_seconds
        self._vocabulary = vocabulary
        self._plugins = plugins
        self._running: WeakValueDictionary[str, RequestGrammar] = WeakValueDictionary()

    def of(self, request_id: str) -> RequestGrammar | None:
        """That of a running request. None means that its output is free."""
        return self._running.get(request_id)

    def start(self, asked: StructuredOutputs | None, request_id: str) -> RequestGrammar | None:
        """A request's grammar before its first token; None for nothing. Raises RequestError: SD-E340, SD-E341, SD-E342.

        Raises what `backend` raises.
        """
        if asked is None:
            return None
        who = f"request {request_id!r}"
        if self._vocabulary.tokenizer is None:
            fix = {"fix": "a model with a tokenizer, or LLM(tokenizer=...)"}
            raise RequestError("SD-E340", f"{who} asks for structured output, and the model has no tokenizer", fix)
        backend = self.backend

        def compiled() -> tuple[RequestGrammar, bool]:
            grammar = RequestGrammar(backend.compile(asked).start(), self._vocabulary)
            return grammar, grammar.is_stuck

        try:
            started, is_stuck = _within(self._most_seconds, compiled)
        except TimeoutError as error:
            facts = {"limit": f"{self._most_seconds:g} s", "fix": "a smaller schema, expression or grammar"}
            raise RequestError("SD-E341", f"{who} asks for structured output that takes too long", facts) from error
        except Exception as error:
            given = asked.model_dump(exclude_defaults=True, by_alias=True)
            facts = {"asked": f"{given!r:.200}", "backend": self._name, "because": f"{describe(error):.400}"}
            raise RequestError("SD-E341", f"{who} asks for structured output that cannot be compiled", facts) from error
        if is_stuck:
            facts = {"backend": self._name, "fix": "a grammar whose texts the tokenizer can write"}
            raise RequestError("SD-E342", f"{who}: its grammar allows no token at all", facts)
        started.on_failure = partial(self._tell, request_id)
        self._running[request_id] = started
        return started

    def _tell(self, request_id: str, error: BaseException) -> None:
        facts = {"request": repr(request_id), "backend": self._name, "error": f"{describe(error):.400}"}
        facts["effect"] = 'the request ends with the reason "error"; the others go on'
        logger.warning("%s", message("SD-W344", "the grammar of a request has failed", facts))

    @cached_property
    def backend(self) -> GrammarBackend:
        """What compiles, loaded when it is asked for. Raises PluginLoadError SD-E118, ConfigError SD-E132, SD-E343."""
        return call_offered("grammars", self._name, self._vocabulary, _as_it_is, self._plugins, ())


def _as_it_is(backend: GrammarBackend) -> GrammarBackend:
    return backend


def _within(seconds: float, compiled: Callable[[], tuple[RequestGrammar, bool]]) -> tuple[RequestGrammar, bool]:
    """What a call returns or raises. Raises TimeoutError if it takes longer: its thread is left behind."""
    answer: Future[tuple[RequestGrammar, bool]] = Future()

    def run() -> None:
        try:
            answer.set_result(compiled())
        except BaseException as error:  # a panic of a library in Rust is no Exception
            answer.set_exception(error if isinstance(error, Exception) else RuntimeError(describe(error)))

    threading.Thread(target=run, name="specdec-grammar", daemon=True).start()
    return answer.result(timeout=seconds)
