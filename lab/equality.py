"""Whether two runs gave the same tokens and, where not, how close the decision was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdec.core.config.sampling_params import SamplingParams
from specdec.core.engine.engine import Engine
from specdec.core.request.request import Request


@dataclass(frozen=True)
class Outputs:
    """Whether outputs are plain decoding's, and what was to be expected of them."""

    equal: bool | None  # None: not compared
    temperature: float
    speculative_config: Mapping[str, Any] | None

    @property
    def are_drawn_anew(self) -> bool:
        """Whether drafts are drawn: then outputs follow the same distribution, with other draws."""
        drawn = (self.speculative_config or {}).get("draft_sample_method") == "probabilistic"
        return self.temperature > 0 and drawn

    @property
    def are_wrong(self) -> bool:
        """Whether they differ though they ought to be equal token by token."""
        return self.equal is False and not self.are_drawn_anew

    @property
    def kind(self) -> str:
        """How outputs came about, and which equality that promises."""
        if self.are_drawn_anew:
            return "sampled with the drafts' distribution: equal in distribution, not token by token"
        return "sampled, same seeds" if self.temperature > 0 else "greedy"

    @property
    def word(self) -> str:
        """The outcome in a word or two."""
        if self.equal is None:
            return "not compared"
        if self.equal:
            return "equal"
        return "DIFFERENT" if self.are_wrong else "drawn anew"


@dataclass(frozen=True)
class TopTwo:
    """The two most likely next tokens of the target, and the margin between their logits."""

    token_ids: tuple[int, int]
    margin: float


@dataclass(frozen=True)
class Difference:
    """The first position where an output is not the plain one.

    The target's choice there is recomputed without drafts in two shapes, token by token and the whole prefix in one
    pass. Margins near zero mean a tie that floating point broke differently, not a wrong token.
    """

    prompt_id: str
    position: int  # in the output, from 0
    plain_token_id: int | None  # None: the output has ended
    found_token_id: int | None
    one_by_one: TopTwo | None  # None where greedy decoding does not lead to this prefix (a sampled run)
    in_one_pass: TopTwo | None

    def sentence(self, tokenizer: Any) -> str:
        """Say it to people. Token ids are shown as text if there is a tokenizer."""
        plain, found = (_shown(token_id, tokenizer) for token_id in (self.plain_token_id, self.found_token_id))
        shapes = {"token by token": self.one_by_one, "in one pass": self.in_one_pass}
        margins = ", ".join(
            f"{shape} {top.margin:.3g} ({' over '.join(_shown(each, tokenizer) for each in top.token_ids)})"
            for shape, top in shapes.items()
            if top
        )
        return (
            f"request {self.prompt_id!r} differs at output position {self.position}: plain {plain}, found {found}; "
            f"margin of the top two logits: {margins}"
        )

    def as_dict(self, tokenizer: Any) -> dict[str, Any]:
        """The fields and the sentence, for a result file."""
        return asdict(self) | {"sentence": self.sentence(tokenizer)}


def first_difference(plain: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two outputs differ, the end of the shorter one included; None if they are equal."""
    for position, (expected, token_id) in enumerate(zip(plain, found, strict=False)):
        if expected != token_id:
            return position
    return None if len(plain) == len(found) else min(len(plain), len(found))


def compare(
    engine: Engine,
    prompts: Mapping[str, Sequence[int]],
    plain: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
) -> list[Difference]:
    """The first difference of each prompt whose outputs differ; `engine` recomputes the logits there without drafts."""
    differences = []
    for prompt_id, prompt in prompts.items():
        position = first_difference(plain[prompt_id], found[prompt_id])
        if position is not None:
            prefix = [*prompt, *plain[prompt_id][:position]]
            differences.append(
                Difference(
                    prompt_id=prompt_id,
                    position=position,
                    plain_token_id=_at(plain[prompt_id], position),
                    found_token_id=_at(found[prompt_id], position),
                    one_by_one=_top_two(engine, prompt, plain[prompt_id][:position]),
                    in_one_pass=_top_two(engine, prefix, ()),
                )
            )
    return differences


def _shown(token_id: int | None, tokenizer: Any) -> str:
    if token_id is None:
        return "the end"
    return f"{token_id}" if tokenizer is None else f"{token_id} {tokenizer.decode([token_id])!r}"


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None


def _top_two(engine: Engine, prompt: Sequence[int], output: Sequence[int]) -> TopTwo | None:
    """The target's choice after `prompt` in one pass and then `output` token by token, if it is greedy decoding's."""
    params = SamplingParams(
        temperature=0, max_tokens=len(output) + 1, logprobs=2, ignore_eos=True, speculative=False, detokenize=False
    )
    request = _finished(engine, engine.add_request(list(prompt), params))
    if request.output_token_ids[:-1] != list(output):
        return None
    (first, high), (second, low) = sorted(request.logprobs[-1].items(), key=lambda item: -item[1])[:2]
    return TopTwo((first, second), high - low)


def _finished(engine: Engine, request_id: str) -> Request:
    while True:
        for each in engine.step():
            if each.request.request_id == request_id and each.request.finish_reason is not None:
                return each.request
