"""Rejections summed up: where drafts fail, what that costs, and what a tree would have caught."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from .trace import Traced, Trial, miss_facts, trials_of

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0, 3.0)
LENGTH_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NUM_CONTEXTS = 20
CONTEXT_TOKENS = 3  # that two places have in common to be the same context
SHOWN_TOKENS = 24


@dataclass
class Tally:
    """Draft tokens of one kind."""

    tried: int = 0
    accepted: int = 0
    lost: int = 0  # draft tokens thrown away by rejections of this kind

    def record(self, trial: Trial) -> None:
        """Count one token."""
        self.tried += 1
        self.accepted += trial.accepted
        self.lost += trial.num_lost

    def facts(self) -> dict[str, Any]:
        """The tally as a result file has it."""
        return {
            "tried": self.tried,
            "accepted": self.accepted,
            "rejected": self.tried - self.accepted,
            "rate": self.accepted / self.tried,
            "lost_draft_tokens": self.lost,
        }


def why_facts(requests: Sequence[Traced], texts: Mapping[str, str]) -> dict[str, Any]:
    """Sum up all requests. texts: of tokens, by id; without them there are no token classes."""
    trials = [trial for request in requests for trial in trials_of(request)]
    misses = [miss_facts(trial) for trial in trials if not trial.accepted]
    return {
        "summary": {
            "position": _in_order(_tallies(trials, lambda trial: trial.position + 1), str),
            "entropy": _in_order(_tallies(trials, _entropy_bin), ENTROPIES.__getitem__),
            "context_length": _in_order(_tallies(trials, _length_bin), LENGTHS.__getitem__),
            "category": _tallies(trials, lambda trial: trial.request.category),
            "token_class": _tallies(trials, lambda trial: token_class(texts.get(str(trial.target_token_id)))),
        },
        "losses": _losses(trials),
        "trees": _trees(misses),
        "ranks": _ranks(misses),
        "position_entropy": _position_entropy(trials),
        "costliest_contexts": _contexts(trials, texts),
    }


def _tallies(trials: Iterable[Trial], key: Callable[[Trial], Any]) -> dict[Any, Any]:
    """Tally the trials by kind, in the order in which kinds are met."""
    tallies: defaultdict[Any, Tally] = defaultdict(Tally)
    for trial in trials:
        tallies[key(trial)].record(trial)
    return {kind: tally.facts() for kind, tally in tallies.items()}


def _in_order(tallies: Mapping[int, Any], name: Callable[[int], str]) -> dict[str, Any]:
    """Sort kinds that are numbers, and name them."""
    return {name(kind): tallies[kind] for kind in sorted(tallies)}


def _bins(edges: Sequence[float]) -> list[str]:
    """The ranges between edges, by the place that `bisect_right` gives a value."""
    return [f"< {edges[0]:g}", *(f"{low:g}-{high:g}" for low, high in pairwise(edges)), f">= {edges[-1]:g}"]


ENTROPIES, LENGTHS = [*_bins(ENTROPY_EDGES), "unknown"], _bins(LENGTH_EDGES)


def _entropy_bin(trial: Trial) -> int:
    if trial.view is None or trial.view.entropy is None:
        return ENTROPIES.index("unknown")
    return bisect_right(ENTROPY_EDGES, trial.view.entropy)


def _length_bin(trial: Trial) -> int:
    return bisect_right(LENGTH_EDGES, trial.context_length)


def token_class(text: str | None) -> str:
    """What kind of token a text is."""
    if text is None:
        return "unknown"
    bare = text.strip()
    if not bare:
        return "line break" if "\n" in text else "blanks"
    if bare.isdigit():
        return "number"
    if any(each.isalpha() for each in bare):
        return "word start" if text[0].isspace() else "word, continued"
    return "punctuation"


def _losses(trials: Sequence[Trial]) -> dict[str, Any]:
    """Whether drafts fail at once, late, or by a grammar: misses of each kind, and draft tokens lost to them."""
    first = [trial for trial in trials if not trial.accepted and trial.position == 0]
    later = [trial for trial in trials if not trial.accepted and trial.position > 0]
    refused = [trial for trial in (*first, *later) if trial.refused]
    return {
        "first_token_misses": len(first),
        "lost_to_first_token_misses": sum(trial.num_lost for trial in first),
        "late_misses": len(later),
        "lost_to_late_misses": sum(trial.num_lost for trial in later),
        "misses_refused_by_grammars": len(refused),
        "lost_to_refused_misses": sum(trial.num_lost for trial in refused),
    }


def _trees(misses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many misses a tree would have caught, of those whose second choices are known."""
    facts: dict[str, Any] = {"misses": len(misses)}
    for width in (2, 3):
        known = [miss[f"caught_by_width_{width}"] for miss in misses if miss[f"caught_by_width_{width}"] is not None]
        facts |= {f"known_for_width_{width}": len(known), f"caught_by_width_{width}": sum(known) if known else None}
    return facts


def _ranks(misses: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many rejected tokens were the target's second choice, third choice and so on."""
    found = Counter(miss["target_rank"] for miss in misses if miss["target_top"] is not None)
    named = {str(rank): found[rank] for rank in sorted(rank for rank in found if rank is not None)}
    return named | ({"beyond what was kept": found[None]} if found[None] else {})


def _position_entropy(trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Tokens tried and accepted by position and the target's entropy; None where no entropy is known."""
    bins = ENTROPIES[:-1]
    known = [trial for trial in trials if _entropy_bin(trial) < len(bins)]
    if not known:
        return None
    cells = _tallies(known, lambda trial: (trial.position, _entropy_bin(trial)))
    positions = range(1 + max(trial.position for trial in known))

    def table(name: str) -> list[list[int]]:
        return [[cells.get((position, place), {}).get(name, 0) for place in range(len(bins))] for position in positions]

    return {"entropy": bins, "tried": table("tried"), "accepted": table("accepted")}


@dataclass
class _Context:
    """Rejections behind the same few tokens."""

    lost: int = 0
    misses: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    wanted: Counter[int] = field(default_factory=Counter)
    example: Trial | None = None


def _contexts(trials: Sequence[Trial], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The contexts behind which most draft tokens are lost."""
    found: defaultdict[tuple[int, ...], _Context] = defaultdict(_Context)
    for trial in trials:
        if not trial.accepted:
            context = found[tuple(trial.context(CONTEXT_TOKENS))]
            context.lost += trial.num_lost
            context.misses += 1
            context.drafted[trial.draft_token_id] += 1
            context.wanted[trial.target_token_id] += 1
            context.example = context.example or trial
    costliest = sorted(found.values(), key=lambda each: (-each.lost, -each.misses))[:NUM_CONTEXTS]
    return [_context_facts(context, texts) for context in costliest]


def _context_facts(context: _Context, texts: Mapping[str, str]) -> dict[str, Any]:
    example = context.example
    assert example is not None, "a context begins with its first miss"
    drafted, wanted = context.drafted.most_common(1)[0][0], context.wanted.most_common(1)[0][0]
    return {
        "lost_draft_tokens": context.lost,
        "misses": context.misses,
        "context": "".join(texts.get(str(each), f"<{each}>") for each in example.context(SHOWN_TOKENS)),
        "drafted": texts.get(str(drafted), f"<{drafted}>"),
        "target": texts.get(str(wanted), f"<{wanted}>"),
        "prompt_id": example.request.prompt_id,
        "category": example.request.category,
        "text_position": example.text_position,
    }
