"""The lines that generate with transformers, the same target and proposer."""

from __future__ import annotations

from pprint import pformat

from specdec.core.host import SpeculativeConfig

from .asked import Asked, HandOver

_LINES = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.adapters.transformers import speculative

model = AutoModelForCausalLM.from_pretrained({model!r})
tokenizer = AutoTokenizer.from_pretrained({model!r})
drafting = speculative(model, {config}, tokenizer=tokenizer)
inputs = tokenizer("def main(", return_tensors="pt")
output = model.generate(**inputs, custom_generate=drafting, max_new_tokens=64)
print(tokenizer.decode(output[0]))"""


def hand_over(asked: Asked) -> HandOver:
    """Every key survives: it is this package's own step, over transformers' model."""
    config = SpeculativeConfig.as_mapping(asked.config)
    if asked.resolved.model is not None:
        config["model"] = asked.resolved.model
    text = _LINES.format(model=asked.model, config=pformat(config, sort_dicts=False, width=100))
    return HandOver(
        engine="transformers",
        route="adapter",
        text=text,
        settings={"speculative_config": config},
        notes=("one prompt a call, or up to speculative(max_num_seqs=N) of them, padded on the left",),
    )
