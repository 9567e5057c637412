"""The grammars of requests, as a worker follows them for a proposer that reads them.

vLLM's scheduler has its own, in another process. So a worker compiles each once more, and takes it along the committed
tokens. Nothing is verified by it: a grammar that differs from vLLM's costs drafts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from specdec.core.host import Grammars, Request, RequestGrammar, registry
from specdec.sdk.errors import RequestError, SpecdecError
from specdec.sdk.structured_outputs import StructuredOutputs, Vocabulary

from .relied_on import KINDS

BACKEND = "xgrammar"
"""What vLLM compiles with where it may choose. Of its backends we have this one."""

MOST_SECONDS = 1.0
"""Of compiling one, while all requests of the worker wait. vLLM's scheduler compiles beside its steps."""

logger = logging.getLogger("specdec")


def unfollowed(vllm_config: Any) -> tuple[str, str] | None:
    """Why no worker can follow the grammars of a vLLM configuration, and a way out. None: they can."""
    asked = vllm_config.structured_outputs_config
    if asked.backend not in ("auto", BACKEND):
        reason = f'vLLM compiles grammars with "{asked.backend}", which workers do not'
        return reason, f'structured_outputs_config={{"backend": "{BACKEND}"}}'
    if asked.reasoning_parser and not asked.enable_in_reasoning:
        reason = f'a grammar begins where the reasoning parser "{asked.reasoning_parser}" says, and workers have none'
        return reason, "no reasoning_parser, or a proposer without Grammars"
    if vllm_config.model_config.skip_tokenizer_init:
        return "a grammar speaks of text, and there is no tokenizer", "skip_tokenizer_init=False"
    return None


class FollowedGrammars:
    """The grammars of one worker's requests."""

    def __init__(self, tokenizer: Any, vocab_size: int, *, compact: bool) -> None:
        """Load the backend, which takes seconds to import. Raises ConfigError SD-E343, PluginLoadError SD-E118.

        compact: JSON has no whitespace, as vLLM was asked for all requests.
        """
        self._compact = compact
        self._asked: WeakKeyDictionary[Request, StructuredOutputs] = WeakKeyDictionary()
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        plugins = registry.PluginSettings.from_environment(os.environ)
        self._grammars = Grammars(BACKEND, Vocabulary(tokenizer, vocab_size, frozenset(ends)), plugins, MOST_SECONDS)
        _ = self._grammars.backend  # loaded here, and not while requests wait

    def of(self, request_id: str) -> RequestGrammar | None:
        """That of a running request. None: its output is free, or nobody follows its grammar."""
        return self._grammars.of(request_id)

    def start(self, request: Request, asked: Any) -> None:
        """Give a new request its grammar. asked: vLLM's StructuredOutputsParams, or None."""
        if asked is not None:
            with _said():
                self._asked[request] = self._read(asked)
        self.restart(request)

    def restart(self, request: Request) -> None:
        """Have its grammar, if it has one, where the request's tokens end."""
        request.grammar = None
        with _said():
            request.grammar = self._grammars.start(self._asked.get(request), request.request_id)
        if request.grammar is not None:
            for token_id in request.output_token_ids:
                request.grammar.accept(token_id)

    def _read(self, asked: Any) -> StructuredOutputs:
        if asked._backend != BACKEND:
            facts = {"fix": f'structured_outputs_config={{"backend": "{BACKEND}"}} refuses what only others compile'}
            raise RequestError("SD-E341", f'vLLM compiles a grammar with "{asked._backend}"; workers do not', facts)
        given = {kind: value for kind in KINDS if (value := getattr(asked, kind)) is not None}
        return StructuredOutputs.parse(given | {"disable_any_whitespace": self._compact}, "structured_outputs")


@contextmanager
def _said() -> Iterator[None]:
    """A worker cannot refuse a request that runs: it says why nobody follows its grammar."""
    try:
        yield
    except SpecdecError as error:
        logger.warning("%s\n  effect  the proposer is not told of this grammar", error)
