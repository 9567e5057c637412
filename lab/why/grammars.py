"""What the grammars of recorded requests refuse, read by the backend that the recording engine had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from specdec.core.engine.grammars import Grammars
from specdec.core.registry import PluginSettings
from specdec.core.request.grammar import RequestGrammar
from specdec.sdk.structured_outputs import Vocabulary

from ..recording import RecordedRequest, Recording
from ..replay.assembly import replay_config, tokenizer_of

Refuses = Callable[[int, int], bool]


def refusals_of(recording: Recording, plugins: PluginSettings) -> Mapping[str, Refuses]:
    """What tells for each request with a grammar, by its id, whether it refuses a token at an output position.

    Raises what `Grammars.start` raises, where what was recorded cannot be compiled here.
    """
    vocab_size = int(recording.manifest.target["vocab_size"])
    vocabulary = Vocabulary(tokenizer_of(recording), vocab_size, frozenset(recording.manifest.eos_token_ids))
    grammars = Grammars(replay_config(recording).structured_outputs_backend, vocabulary, plugins)
    started = [(each, grammars.start(each.structured_outputs, each.request_id)) for each in recording]
    return {
        each.request_id: partial(_refuses, grammar, each, vocab_size)
        for each, grammar in started
        if grammar is not None
    }


def _refuses(grammar: RequestGrammar, request: RecordedRequest, vocab_size: int, position: int, token_id: int) -> bool:
    return not bool(grammar.allowed(request.token_ids[:position], vocab_size)[token_id])
