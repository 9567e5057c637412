"""Any specdec proposer inside transformers' `model.generate`, through its public `custom_generate=`.

drafting = speculative(model, {"model": "path/to/drafter", "num_speculative_tokens": 5})
model.generate(**inputs, custom_generate=drafting, max_new_tokens=64)
"""

from .decoding import SpeculativeDecoding, speculative

__all__ = ["SpeculativeDecoding", "speculative"]
