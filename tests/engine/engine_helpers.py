"""Building engines for tests, reading their counters, and comparing tokens so that ties are recognisable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import specdec
from specdec import LLM, SamplingParams

TINY = (Path(specdec.__file__).parent / "assets" / "tiny").resolve()
NUM_REFERENCE_TOKENS = 48
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)


def make_llm(proposer=None, *, k=4, options=None, speculative=None, model="tiny", **settings):
    """An LLM with a proposer of `engine_proposers` (a class name) or by any `method` ("ngram", "module:Class")."""
    settings = {"max_model_len": 512, "max_num_seqs": 16} | settings
    config = None
    if proposer is not None:
        method = f"engine_proposers:{proposer}" if proposer[0].isupper() else proposer
        config = {"method": method, "num_speculative_tokens": k, "proposer_config": options or {}}
        config |= speculative or {}
    return LLM(model, speculative_config=config, **settings)


def counter(llm, name):
    """The value of one counter, 0 if it was never touched."""
    return next((metric.value for metric in llm.get_metrics() if metric.name == f"specdec:{name}"), 0)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def run(engine, max_steps=5000):
    """Step until nothing is left, checking the engine's own books each time. Returns finished requests by id."""
    finished = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests:
            return finished
        for each in checked_step(engine):
            if each.request.finish_reason is not None:
                finished[each.request.request_id] = each.request
    raise AssertionError(f"requests are left after {max_steps} steps")


def checked_step(engine):
    """One step, then every invariant that holds between steps."""
    committed = engine.step()
    engine.check_integrity()
    for each in committed:
        request = each.request
        if each.token_ids and request.finish_reason is None:
            missing = len(request.token_ids) - request.num_computed_tokens
            assert missing == 1, f"{request.request_id}: {missing} tokens without KV after sampling"
    return committed


def assert_same_tokens(found: Sequence[Sequence[int]], expected, prompts, model):
    """Token equality; a difference is reported with the two best logits there, so that a tie is told from a bug."""
    for index, (ours, theirs, prompt) in enumerate(zip(found, expected, prompts, strict=True)):
        if list(ours) != list(theirs):
            raise AssertionError(f"output {index}: {difference(ours, theirs, prompt, model)}")


def difference(ours, theirs, prompt, model):
    """Where two outputs part, and by what margin the reference preferred its token."""
    at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"lengths differ: {len(ours)} and {len(theirs)}"
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *theirs[:at]]])).logits[0, -1]
    best = logits.topk(2)
    return (
        f"token {at} is {ours[at]}, expected {theirs[at]}; best {best.indices.tolist()} "
        f"with margin {float(best.values[0] - best.values[1]):.2e}, "
        f"logit of ours {float(logits[ours[at]]):.6f}, of the best {float(best.values[0]):.6f}"
    )


def generate(model, prompt):
    """What greedy `generate` of transformers appends."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_REFERENCE_TOKENS, do_sample=False, pad_token_id=0
        )
    return output[0, len(prompt) :].tolist()
