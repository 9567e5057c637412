"""Why on a recording: each proposer is replayed, and what was recorded of the target is held beside its drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from specdec.core.engine.grammars import Grammars
from specdec.core.registry import PluginSettings
from specdec.core.request.grammar import RequestGrammar
from specdec.sdk import ConfigError
from specdec.sdk.errors import Refusal
from specdec.sdk.structured_outputs import Vocabulary

from ..comparison.recorded import replayed_facts
from ..comparison.variants import Variant
from ..measure import Step, counts_of, summed
from ..progress import NoProgress
from ..recording import RecordedRequest, Recording
from ..replay.assembly import replay_config, tokenizer_of
from ..replay.rows import recorded_cell, recorded_texts, refuse_drawn, request_rows
from ..replay.run import Replayed, replay
from ..result import SCHEMA_VERSION, acceptance_facts
from .choices import PROBE_TEMPERATURES, ChoicesListener
from .summary import why_facts
from .trace import Choices, Traced, View, free, misses_of

Replay = Callable[..., Replayed]
Found = dict[tuple[str, int, int], Choices]  # as of `ChoicesListener`
Refuses = Callable[[int, int], bool]


def run_why(
    folder: Path,
    variants: Sequence[Variant],
    plugins: PluginSettings,
    progress: NoProgress,
    *,
    model: str | Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Replay every variant on the recording in `folder` and explain its rejections.

    model, device: as of `replay`. Raises ConfigError SD-E257 if the recording holds no probabilities, SD-E251 for drawn
    drafts of sampled text, SpecdecError.
    """
    recording = Recording.open_filled(folder)
    if recording.manifest.top_m == 0:
        facts = {"recorded": str(folder), "fix": "record again with --top-m 20, into another folder"}
        raise ConfigError("SD-E257", "the recording holds no probabilities of the target", facts)
    replayed = []
    for variant in variants:
        progress.stage(f"replaying {variant.label}")
        once = partial(replay, recording, plugins=plugins, model=model, device=device)
        replayed.append(_replayed(variant, once))
        refuse_drawn(replayed[-1][0], variant.label)
    texts = recorded_texts(recording, [run.steps for run, _, _ in replayed])
    refusals = _refusals_of(recording, plugins)
    rows = [_row(recording, variant, *each, texts, refusals) for variant, each in zip(variants, replayed, strict=True)]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "why",
        **recorded_cell(recording),
        "rows": rows,
        "token_texts": texts,
    }


def _replayed(variant: Variant, once: Replay) -> tuple[Replayed, Found, str]:
    """The replay, what its proposer thought, and how that is known.

    A greedy draft comes without a distribution. Where the proposer can report one, further replays make it do so. Steps
    of the first replay that begin where none of theirs does stay without one.
    """
    seen = ChoicesListener(None)
    run = once(variant.speculative_config, listener=seen)
    if seen.found:
        return run, seen.found, "reported with the drafts"
    found: Found = {}
    asked = {**variant.speculative_config, "draft_sample_method": "probabilistic"}
    asked.pop("max_nodes", None)  # along the path a tree's drafter thinks what its chain does
    for temperature in PROBE_TEMPERATURES:
        probe = ChoicesListener(temperature)
        try:
            once(asked, listener=probe, temperature=temperature)
        except Refusal:
            return run, found, "not reported"
        found = probe.found | found
    return run, found, "reported by further replays"


def _refusals_of(recording: Recording, plugins: PluginSettings) -> Mapping[str, Refuses]:
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


def _row(
    recording: Recording,
    variant: Variant,
    replayed: Replayed,
    found: Found,
    origin: str,
    texts: Mapping[str, str],
    refusals: Mapping[str, Refuses],
) -> dict[str, Any]:
    steps = replayed.steps
    traced = [
        _traced(request, steps[request.request_id], found, refusals.get(request.request_id, free))
        for request in recording
    ]
    requests = request_rows(recording, steps)
    counts = {request.request_id: counts_of(steps[request.request_id]) for request in recording}
    categories = dict.fromkeys(request.category for request in recording)
    return {
        "label": variant.label,
        **replayed_facts(variant, replayed),
        **acceptance_facts(summed(counts.values())),
        "by_category": {
            name: acceptance_facts(summed(counts[each.request_id] for each in recording if each.category == name))
            for name in categories
        },
        "proposer_distributions": origin,
        **why_facts(traced, texts),
        "requests": [{**row, "misses": misses_of(each)} for row, each in zip(requests, traced, strict=True)],
    }


def _traced(request: RecordedRequest, steps: Sequence[Step], found: Found, refuses: Refuses) -> Traced:
    starts = list(accumulate((step.num_committed for step in steps), initial=0))

    def view(place: int) -> View | None:
        pairs = zip(request.top_ids[place].tolist(), request.top_logprobs[place].exp().tolist(), strict=True)
        entropy = float(request.entropy[place])
        return View(list(pairs), None if entropy != entropy else entropy)  # NaN: not recorded

    def choices(step: int, position: int) -> Choices | None:
        return found.get((request.request_id, starts[step], position))

    return Traced(
        prompt_id=request.request_id,
        category=request.category,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=request.token_ids,
        steps=steps,
        target=view,
        proposer=choices,
        refuses=refuses,
    )
