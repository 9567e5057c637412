"""Requests under grammars beside requests without one, for engines that take the same names."""

from __future__ import annotations

from specdec import LLM, SamplingParams

CALL = {
    "type": "object",
    "properties": {
        "function_name": {"enum": ["search_flights", "book_hotel"]},
        "arguments": {
            "type": "object",
            "properties": {"destination_city": {"enum": ["Paris", "Rome"]}, "number_of_days": {"enum": [1, 2, 30]}},
            "required": ["destination_city", "number_of_days"],
        },
    },
    "required": ["function_name", "arguments"],
}
FORMS = [
    {"json": CALL},
    None,
    {"regex": "The answer is [0-9]{2} and nothing else\\."},
    {"choice": ["certainly not", "certainly so"]},
    {"grammar": 'root ::= "(" root ")" | "xyzzy plugh"'},
    {"json": CALL},
    None,
    {"json_object": True},
]
SAMPLING = [{"max_tokens": 40} | ({} if form is None else {"structured_outputs": form}) for form in FORMS]
"""Of each of eight prompts."""


def in_the_core(prompts, config, sampling=SAMPLING):
    """The texts of our own engine as token ids, and its acceptance."""
    params = [SamplingParams(temperature=0, **each) for each in sampling]
    with LLM("tiny", speculative_config=config, max_model_len=512, max_num_seqs=8) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [[list(one.token_ids) for one in output.outputs] for output in outputs], llm.engine.metrics.acceptance
