"""The recorded streams of views: `python -m tests.views.streams` writes them anew.

A changed file is a changed promise. Tests compare what the engine shows now with what it showed when a version of the
contract was published, field by field. A field that came later is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.helpers.inside import proposer_of

from specdec import LLM, SamplingParams
from specdec.testing.moves import LONG, Move
from specdec.testing.stage import Stage
from specdec.testing.subject import Subject
from specdec.testing.worlds import FewTokens

from .recorder import VOCAB_SIZE, Recorder

FOLDER = Path(__file__).parent / "recorded"
Entry = dict[str, Any]
K = 3
PROMPT = (300, 17, 45, 1021, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def stage(max_num_seqs: int = 2, max_nodes: int | None = None, **needs: Any) -> Stage:
    """The recorder on the engine's own step, with a stand-in for the target whose numbers are exact."""
    settings = {"num_speculative_tokens": K, "max_nodes": max_nodes, "proposer_config": {"needs": needs}}
    return Subject(Recorder, settings).stage(world=FewTokens(VOCAB_SIZE), max_num_seqs=max_num_seqs, max_model_len=64)


def drive(on: Stage, *steps: Sequence[Move]) -> None:
    for moves in steps:
        on.step(moves)


def chunked_prefill() -> Stage:
    """A prompt in three parts, beside a request that decodes."""
    on = stage()
    on.add("long", 17)
    on.add("short", 2)
    drive(on, [Move("short"), Move("long", 7)], [Move("long", 7), Move("short")], [Move("long"), Move("short")])
    drive(on, [Move("short"), Move("long")])
    return on


def preempt() -> Stage:
    """A request loses its slot to another one, and comes back."""
    on = stage(max_num_seqs=1)
    on.add("first", 3)
    on.add("second", 2)
    drive(on, [Move("first")], [Move("first", num_accepted=2)])
    on.preempt("first")
    drive(on, [Move("second")], [Move("second", num_accepted=0)])
    on.finish("second")
    drive(on, [Move("first", 4)], [Move("first")], [Move("first", num_accepted=1)])
    return on


def reject() -> Stage:
    """None, some and all of the drafts are accepted, and rejected ones are shown."""
    on = stage(extensions=[{"id": "target_tokens@1", "top_k": 2, "rejected": True}])
    on.add("a", 3)
    on.add("b", 1)
    drive(on, [Move("a"), Move("b")], *([Move("a", num_accepted=i), Move("b", num_accepted=3 - i)] for i in range(4)))
    return on


def end() -> Stage:
    """By length, by an abort in the middle of a prompt, and a slot that is taken at once."""
    on = stage()
    on.add("short", 3, LONG.replace(max_tokens=4))
    on.add("aborted", 9)
    drive(on, [Move("short"), Move("aborted", 4)])
    on.finish("aborted")
    on.add("next", 2)
    drive(on, [Move("short", num_accepted=1), Move("next")], [Move("short", num_accepted=0), Move("next")])
    drive(on, [Move("next")])
    return on


def cached_prefix() -> Stage:
    """What lies before position 6 was computed for another request."""
    on = stage()
    prompt = on.add("first", 9).prompt_token_ids
    drive(on, [Move("first")])
    on.add_behind("cached", "first", 6, prompt)
    drive(on, [Move("cached"), Move("first")], [Move("first"), Move("cached")])
    return on


def tree() -> Stage:
    """Drafts that branch, of which a path is accepted."""
    on = stage(max_nodes=6, extensions=["trees@1"])
    on.add("a", 3)
    on.add("b", 5)
    drive(on, [Move("a"), Move("b")], *([Move("b", num_accepted=i), Move("a", num_accepted=2 - i)] for i in range(3)))
    return on


def hidden_states() -> Stage:
    """Of two layers, for kept tokens alone."""
    on = stage(hidden_states=(1, "final"))
    on.add("a", 4)
    on.add("b", 2)
    drive(on, [Move("a"), Move("b")], [Move("a", num_accepted=1), Move("b", num_accepted=3)], [Move("b")])
    return on


def device_form() -> Stage:
    """All that was computed, with the rejected tokens between; slots, histories and sampling as tensors."""
    on = stage(placement="device", hidden_states=(2,), sampling=("temperature", "top_k", "top_p", "min_p"))
    on.add("a", 4, LONG.replace(temperature=0.5, top_k=5))
    on.add("b", 2, LONG.replace(temperature=1.0, top_p=0.75, min_p=0.125))
    drive(on, [Move("a", 3), Move("b")], [Move("a"), Move("b", num_accepted=1)])
    drive(on, [Move("b", num_accepted=0), Move("a", num_accepted=3)], [Move("a")])
    return on


def idle() -> Stage:
    """Steps without requests and dummy steps, between those of a request."""
    on = stage(placement="device")
    on.add("a", 3)
    drive(on, [Move("a")])
    on.idle(dummy=False)
    on.idle(dummy=True)
    on.idle_with(1)
    drive(on, [Move("a", num_accepted=1)])
    return on


def request_options() -> Stage:
    """What a request says to the proposer, its namespace, and a budget of its own."""
    on = stage()
    on.add("a", 3, LONG.replace(extra_args={"specdec": {"colour": "red"}}, namespace="mine"))
    on.add("b", 3, LONG.replace(num_speculative_tokens=1))
    drive(on, [Move("a"), Move("b")], [Move("a"), Move("b")])
    return on


def stop_in_mid_draft() -> LLM:
    """A stop token stands within an accepted draft; what follows it is dropped."""
    text = greedy_text()
    return served(text, GREEDY.replace(stop_token_ids=(text[len(PROMPT) + 5],), min_tokens=5))


def several_outputs() -> LLM:
    """Three outputs of one prompt, seeded, that share what they have in common."""
    return served(greedy_text(), SamplingParams(n=3, seed=7, temperature=0.8, max_tokens=6), sampling=("temperature",))


def many_requests() -> LLM:
    """More requests than slots, and fewer blocks than they want."""
    text = greedy_text()
    prompts = [text[: 2 + number] for number in range(4)]
    return served(
        text,
        GREEDY.replace(max_tokens=6),
        prompts,
        max_num_seqs=3,
        num_kv_blocks=2,
        block_size=8,
        max_num_batched_tokens=8,
    )


def greedy_text() -> list[int]:
    """The prompt, and what the tiny target says to it without drafts."""
    [output] = LLM("tiny", max_model_len=64).generate([{"prompt_token_ids": PROMPT}], GREEDY)
    return [*PROMPT, *output.outputs[0].token_ids]


def served(
    text: Sequence[int],
    params: SamplingParams,
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    sampling: Sequence[str] = (),
    **settings: Any,
) -> LLM:
    """The whole engine with the tiny target, behind prompts whose text the recorder knows."""
    config = {
        "method": f"{Recorder.__module__}:Recorder",
        "num_speculative_tokens": K,
        "proposer_config": {"texts": [list(text)], "needs": {"sampling": list(sampling)}},
    }
    llm = LLM("tiny", speculative_config=config, **{"max_model_len": 64, "max_num_seqs": 4} | settings)
    llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)
    return llm


SCENARIOS: dict[str, Callable[[], Stage | LLM]] = {
    scenario.__name__: scenario
    for scenario in (
        cached_prefix, chunked_prefill, device_form, end, hidden_states, idle, many_requests, preempt, reject,
        request_options, several_outputs, stop_in_mid_draft, tree,
    )
}  # fmt: skip


def stream(name: str) -> list[Entry]:
    """What the recorder is told in one scenario, as JSON says it."""
    run = SCENARIOS[name]()
    proposer = run.host.proposer if isinstance(run, Stage) else proposer_of(run)
    entries: list[Entry] = json.loads(json.dumps(proposer.entries))
    return entries


def recorded(name: str) -> list[Entry]:
    """What it was told when the file was written."""
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def differences(before: Sequence[Entry], now: Sequence[Entry]) -> Iterator[str]:
    """Step, field and request of everything that was shown otherwise, or is no longer shown."""
    for step, (old, new) in enumerate(zip_longest(before, now, fillvalue={"call": "nothing"})):
        for field, value in old.items():
            if isinstance(value, dict):
                shown = new.get(field, {})
                pairs = [(f" of {name}", value.get(name), shown.get(name)) for name in dict.fromkeys([*value, *shown])]
            else:
                pairs = [("", value, new.get(field))]
            for whose, was, found in pairs:
                if not agrees(was, found):
                    yield f"call {step} ({old['call']}): {field}{whose} was {was}, is {found}"


def agrees(was: Any, found: Any) -> bool:
    """Whether all that was shown is shown. Fields of parts may have been added."""
    if isinstance(was, dict) and isinstance(found, dict):
        return all(agrees(value, found.get(name)) for name, value in was.items())
    return bool(was == found)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        lines = [json.dumps(entry) for entry in stream(scenario)]
        (FOLDER / f"{scenario}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
