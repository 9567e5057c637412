"""The suffix proposer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from specdec.sdk import Draft, Needs, ProposerConfig, RequestView, Services, StepView, StrictModel, TargetInfo
from specdec.sdk.extensions import State, Trees
from specdec.sdk.trees import Tree, best_first

from .automaton import START, Place, SuffixAutomaton
from .corpus import Corpora

MOST_DEPTH = 256
"""Where text loops, each token and each draft visit every context up to the depth."""
MOST_FACTOR = 1e3  # the most drafts of a step


@dataclass(frozen=True)
class Guess:
    """A draft, and how many tokens of the text's ending it goes on from."""

    token_ids: list[int]
    match_length: int
    source: tuple[SuffixAutomaton, Place] | None = None  # the text and the context that it follows


class _Request:
    """What is known of one request: the automaton of its tokens, and where their ending stands in the corpus."""

    def __init__(self, num_prompt_tokens: int, depth: int, namespace: str) -> None:
        self.namespace = namespace
        self.text = SuffixAutomaton(depth)
        self.recent: list[int] = []  # the last `depth` tokens
        self.output: list[int] = []
        self._depth = depth
        self._num_prompt_tokens = num_prompt_tokens
        self._places: dict[SuffixAutomaton, Place] = {}

    def extend(self, token_ids: Sequence[int], shared: Sequence[SuffixAutomaton]) -> None:
        """Append tokens, and follow them through what is shared; what is new there is given the recent ones."""
        output_start = max(self._num_prompt_tokens - len(self.text), 0)
        self.output += token_ids[output_start:]
        self.text.extend(token_ids)
        self.recent = [*self.recent, *token_ids][-self._depth :]
        self._places = {automaton: self._advanced(automaton, token_ids) for automaton in shared}

    def _advanced(self, automaton: SuffixAutomaton, token_ids: Sequence[int]) -> Place:
        place = self._places.get(automaton)
        if place is None or len(token_ids) > self._depth:
            place, token_ids = START, self.recent
        for token in token_ids:
            place = automaton.advance(place, token)
        return place

    def matches(self) -> list[tuple[SuffixAutomaton, Place]]:
        """Where the text's ending occurs: in the text itself, and in the corpus."""
        return [(self.text, self.text.tail), *self._places.items()]


class SuffixProposer:
    """Drafts what most often followed the text's ending, in the text itself and in the outputs of ended requests.

    The method is SuffixDecoding (arXiv 2411.04975): of every suffix of the text that occurred before, the likeliest
    continuation is scored by the number of its tokens that the counts expect to be right, and the best one is
    drafted. An output of another request is followed only where its match is longer than the text's own. A draft is
    as long as its confidence: it ends where the probability of the whole falls below
    `suffix_decoding_min_token_prob`. Options have vLLM's names.

    Differences from the paper: strings live in suffix automata, not trees, so memory is linear in the text whatever the
    depth, and the depth bounds the context of a token, not match and draft together; of tokens that followed equally
    often the latest is drafted; a continuation that reaches the end of the text goes on from its own ending, so text
    that loops gets whole drafts. Two defaults differ from vLLM's, measured by `benchmarks/suffix_lookup.py`: contexts
    of more than 8 tokens (vLLM: 24) cost time and gain nothing, and drafts no longer than their match (vLLM: a factor
    of 1) lose a good part of what the counts can give.

    Tokens are taken in as they are committed. Those of a request only grow: one that was preempted comes back with
    the same ones, and a text that is computed again adds nothing until it passes what is known. An ended request
    leaves its output to the corpus, as far as it was shown: the last step of a request is not. With the corpus,
    timing depends on what others asked before; `suffix_decoding_max_cached_requests=0` keeps requests to
    themselves, and a request's `namespace` shares with requests of the same one only.
    """

    class Options(StrictModel):
        """vLLM's names and, where nothing else is said, its defaults."""

        suffix_decoding_max_tree_depth: int = Field(
            default=8,
            ge=1,
            le=MOST_DEPTH,
            description="the most tokens of the context that a drafted token is chosen by (vLLM: 24)",
        )
        suffix_decoding_max_cached_requests: int = Field(
            default=10_000, ge=0, description="the most ended requests whose outputs are kept; 0: none"
        )
        suffix_decoding_max_cached_tokens: int = Field(
            default=1_000_000, ge=4, description="the most tokens of all outputs kept; about 150 bytes each"
        )
        suffix_decoding_max_spec_factor: float | None = Field(
            default=None,
            gt=0,
            le=MOST_FACTOR,
            description="the most drafted tokens per token of the match; None: no such limit (vLLM: 1.0)",
        )
        suffix_decoding_min_token_prob: float = Field(
            default=0.1, ge=0, le=1, description="the least estimated probability of a draft up to each of its tokens"
        )

    @classmethod
    def needs(cls, config: ProposerConfig, target: TargetInfo) -> Needs:
        """Token history; state is shared unless no outputs are kept."""
        options = config.options or cls.Options()
        shared = options.suffix_decoding_max_cached_requests > 0
        trees = () if config.max_nodes is None else (Trees(),)
        state: Literal["shared", "per_request"] = "shared" if shared else "per_request"
        return Needs(history=True, state=state, extensions=(State(), *trees))

    default_draft_tokens = 24
    """vLLM's; drafts end where their confidence does."""

    def __init__(self, config: ProposerConfig) -> None:
        self._options: SuffixProposer.Options = config.options or self.Options()
        self._depth, self._draws_trees = config.num_draft_tokens, config.max_nodes is not None
        self._requests: dict[str, _Request] = {}
        self._corpora = Corpora(
            self._options.suffix_decoding_max_tree_depth,
            self._options.suffix_decoding_max_cached_requests,
            self._options.suffix_decoding_max_cached_tokens,
        )

    def bind(self, target: TargetInfo, services: Services) -> None:
        """Remember the vocabulary, for `save` and `load`."""
        self._vocab_size = target.vocab_size

    def on_start(self, request: RequestView) -> None:
        """Begin with nothing."""
        depth = self._options.suffix_decoding_max_tree_depth
        self._requests[request.request_id] = _Request(len(request.prompt_token_ids), depth, request.namespace)

    def observe(self, step: StepView) -> None:
        """Take in the tokens that were committed since each request was last shown."""
        assert step.history is not None, "declared in needs"
        for b, request_id in enumerate(step.request_ids):
            request = self._requests[request_id]
            shared = self._corpora.automata(request.namespace)
            try:
                request.extend(step.history.token_ids(b, len(request.text)), shared)
            except BaseException:  # an interrupt leaves it half grown: the next step reads the whole text again
                self.on_start(step.requests[b])
                raise

    def propose(self, step: StepView) -> Draft:
        """Draft for each request the continuation that expects the most right tokens within its budget."""
        wanted = zip(step.request_ids, step.budget.tolist(), strict=True)
        if self._draws_trees:
            trees = [self._tree(self._requests[name], budget) for name, budget in wanted]
            return Draft.from_trees(trees, step.width)
        drafts = [self._chosen(self._requests[request_id], budget).token_ids for request_id, budget in wanted]
        return Draft.from_lists(drafts, step.width)

    def on_finish(self, request: RequestView) -> None:
        """Forget the request, and keep its output."""
        self._corpora.add(request.namespace, self._requests.pop(request.request_id).output)

    def save(self, path: Path) -> None:
        """Write the outputs that are kept below `path`."""
        self._corpora.save(path, self._vocab_size)

    def load(self, path: Path) -> None:
        """Add the outputs that `save` wrote. Raises ConfigError SD-E180 if they are of another vocabulary."""
        self._corpora.load(path, self._vocab_size)

    def _tree(self, request: _Request, budget: int) -> Tree:
        """The likeliest continuations of the context that a chain would follow."""
        chosen = self._chosen(request, min(budget, self._depth))
        if chosen.source is None:
            return []
        automaton, context = chosen.source
        least = self._options.suffix_decoding_min_token_prob

        def children(state: tuple[Place, float]) -> Iterator[tuple[int, float, tuple[Place, float]]]:
            place, above = state
            for token, share, after in automaton.followers(place):
                if above * share >= least:
                    yield token, share, (after, above * share)

        tree, _ = best_first(children, (context, 1.0), self._limit(chosen.match_length, budget), self._depth)
        return tree

    def _chosen(self, request: _Request, budget: int) -> Guess:
        """Follow the text with the longest match. Where lengths are equal, follow the request's own text."""
        chosen = Guess([], 0)
        for automaton, place in request.matches() if budget else ():
            guess = self._guess(automaton, place, budget)
            if guess.match_length > chosen.match_length:
                chosen = guess
        return chosen

    def _guess(self, automaton: SuffixAutomaton, place: Place, budget: int) -> Guess:
        """Take the longest match of a text, unless a shorter one expects more right tokens."""
        best, best_expected = Guess([], 0), 0.0
        for context in automaton.contexts(place):
            limit = self._limit(context.length, budget)
            if limit <= best_expected:
                break
            draft, expected = automaton.draft(context, limit, self._options.suffix_decoding_min_token_prob)
            if expected > best_expected:
                best, best_expected = Guess(draft, context.length, (automaton, context)), expected
        return best

    def _limit(self, match_length: int, budget: int) -> int:
        factor = self._options.suffix_decoding_max_spec_factor
        return budget if factor is None else min(budget, int(match_length * factor))
