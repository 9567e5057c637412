"""Rejections summed up: where drafts fail, what that costs, and what a tree would have caught."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from .trace import Traced, Trial, miss_facts, trials_of

ENTROPY_EDGES = (0.1, 0.5, 1.0, 2.0, 3.0)
LENGTH_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NUM_CONTEXTS = 20
CONTEXT_TOKENS = 3  # that two places have in common to be the same context
SHOWN_TOKENS = 24


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


def _grouped(trials: Iterable[Trial], key: Callable[[Trial], Any]) -> dict[Any, list[Trial]]:
    """The trials by kind, in the order in which kinds are met."""
    groups: defaultdict[Any, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(trial)
    return groups


def _tallies(trials: Iterable[Trial], key: Callable[[Trial], Any]) -> dict[Any, Any]:
    """Count draft tokens by kind."""
    found = {}
    for kind, group in _grouped(trials, key).items():
        tried, accepted = len(group), sum(trial.accepted for trial in group)
        counts = {"tried": tried, "accepted": accepted, "rejected": tried - accepted, "rate": accepted / tried}
        found[kind] = counts | {"lost_draft_tokens": _lost(group)}
    return found


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
        "lost_to_first_token_misses": _lost(first),
        "late_misses": len(later),
        "lost_to_late_misses": _lost(later),
        "misses_refused_by_grammars": len(refused),
        "lost_to_refused_misses": _lost(refused),
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


def _contexts(trials: Sequence[Trial], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """The contexts behind which most draft tokens are lost."""
    misses = (trial for trial in trials if not trial.accepted)
    groups = _grouped(misses, lambda trial: tuple(trial.context(CONTEXT_TOKENS)))
    costliest = sorted(groups.values(), key=lambda each: (-_lost(each), -len(each)))[:NUM_CONTEXTS]
    return [_context_facts(each, texts) for each in costliest]


def _context_facts(misses: Sequence[Trial], texts: Mapping[str, str]) -> dict[str, Any]:
    """Rejections behind the same few tokens."""
    example = misses[0]
    drafted = Counter(each.draft_token_id for each in misses).most_common(1)[0][0]
    wanted = Counter(each.target_token_id for each in misses).most_common(1)[0][0]
    return {
        "lost_draft_tokens": _lost(misses),
        "misses": len(misses),
        "context": "".join(texts.get(str(each), f"<{each}>") for each in example.context(SHOWN_TOKENS)),
        "drafted": texts.get(str(drafted), f"<{drafted}>"),
        "target": texts.get(str(wanted), f"<{wanted}>"),
        "prompt_id": example.request.prompt_id,
        "category": example.request.category,
        "text_position": example.text_position,
    }


def _lost(trials: Iterable[Trial]) -> int:
    """Draft tokens thrown away by rejections."""
    return sum(trial.num_lost for trial in trials)
