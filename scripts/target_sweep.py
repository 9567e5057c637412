"""Verify model types: which of transformers' language models are served, and how truly.

python -m scripts.target_sweep                       all types that docs/reference/targets.json lacks
python -m scripts.target_sweep --again               all types
python -m scripts.target_sweep TYPE [TYPE ...]       only these, types or variants
python -m scripts.target_sweep --newest ...          the same for targets-newest.json; nox -s targets

A type is verified by a small model with random weights: its greedy text is compared with that of `generate`, one
request at a time. It is served plainly, with n-gram drafts, and with drafts of which half is garbage. The last is done
in small chunks, with so few blocks that requests are preempted. Each outcome is written as it is known, so that a sweep
goes on where it ended. `python -m scripts.target_table` makes the page of the docs from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec import LLM, SamplingParams
from specdec.core.model.target import load_config
from specdec.sdk import SpecdecError

from .small_models import (
    VOCAB_SIZE,
    NotBuildableError,
    model_types,
    multimodal_types,
    small_config,
    small_model,
)
from .target_variants import VARIANTS

RECORD = Path(__file__).parents[1] / "docs" / "reference" / "targets.json"
"""With the transformers that constraints.txt pins."""
NEWEST = RECORD.with_name("targets-newest.json")
"""With the newest that was tried."""

PROMPT_LENGTHS = 5, 19, 45
NUM_TOKENS = 24
NGRAM: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
FEW_BLOCKS: Mapping[str, Any] = {"num_kv_blocks": 26, "max_num_batched_tokens": 16}
"""Of 4 tokens: the three requests need 37, and the longest one 18."""


@dataclass(frozen=True)
class Outcome:
    """What became of one type."""

    outcome: str  # "equal", "refused", "not buildable", and never "different" or "crash"
    code: str | None = None  # of a refusal
    reason: str | None = None
    hidden_states: str | None = None  # of a type that is served: "shown", or the code of their refusal


def verify(model_type: str) -> Outcome:
    """Build a small model of this type, serve it, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = _saved(model_type, Path(folder))
            with torch.random.fork_rng():
                return _served(folder, model)
        except NotBuildableError as error:
            return Outcome("not buildable", reason=str(error))
        except SpecdecError as error:
            return Outcome("refused", error.code, _reason(error).replace(f" {folder!r}", ""))
        except Exception as error:
            return Outcome("crash", reason=f"{type(error).__name__}: {error}")


def _saved(model_type: str, folder: Path) -> Any:
    """A checkpoint in `folder`; its model. Raises NotBuildableError, UnsupportedModelError."""
    try:
        model = small_model(small_config(model_type))
    except NotBuildableError:
        _refuse_by_configuration(model_type, folder)
        raise
    if not model.can_generate():
        raise NotBuildableError("it does not generate text")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def _refuse_by_configuration(model_type: str, folder: Path) -> None:
    """Of any size: raises SpecdecError where the configuration alone tells that the type is not served."""
    try:
        CONFIG_MAPPING[model_type]().save_pretrained(folder)
    except Exception:
        return
    load_config(str(folder))


def _served(folder: str, model: Any) -> Outcome:
    prompts = _prompts()
    plain = _text(folder, prompts, None)
    expected = _generated(model, prompts)
    if plain != expected:
        return Outcome("different", reason="plain")
    if _text(folder, prompts, NGRAM) != expected:
        return Outcome("different", reason="with n-gram drafts")
    texts = [[*prompt, *text] for prompt, text in zip(prompts, expected, strict=True)]
    states, found = _with_garbage(folder, prompts, texts)
    return Outcome("equal", hidden_states=states) if found == expected else Outcome("different", reason="with garbage")


def _with_garbage(folder: str, prompts: Sequence[Any], texts: Sequence[Any]) -> tuple[str, list[list[int]]]:
    """Whether hidden states are shown, and the text."""
    drafts = {"num_speculative_tokens": 4, "texts": texts}
    try:
        return "shown", _text(folder, prompts, drafts | {"model": _GARBAGE + "WithStates"}, **FEW_BLOCKS)
    except SpecdecError as error:
        if error.code != "SD-E145":
            raise
        return error.code, _text(folder, prompts, drafts | {"model": _GARBAGE}, **FEW_BLOCKS)


_GARBAGE = "scripts.half_garbage.HalfGarbage"


def _text(folder: str, prompts: Sequence[Any], drafts: Mapping[str, Any] | None, **settings: Any) -> list[list[int]]:
    llm = LLM(folder, max_model_len=128, block_size=4, max_num_seqs=4, speculative_config=drafts, **settings)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    served = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(each.outputs[0].token_ids) for each in served]


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def _generated(model: Any, prompts: Iterable[Sequence[int]]) -> list[list[int]]:
    """What transformers appends to each prompt. Raises NotBuildableError if the model says hardly anything."""
    texts = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(output[0, len(prompt) :].tolist())
    if len({token for text in texts for token in text}) < 3:
        raise NotBuildableError(f"with random weights it says {texts[0][:4]} and nothing else")
    return texts


def _reason(error: SpecdecError) -> str:
    return str(error.facts.get("reason") or error.facts.get("because") or error.summary)


def main(asked: Sequence[str], file: Path, *, again: bool) -> None:
    """Verify the types that are asked for, or else those that the record in this file lacks."""
    record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    version = record.get("transformers", transformers.__version__)
    if asked and version != transformers.__version__:
        sys.exit(
            f"{file.name} is of transformers {version}, and {transformers.__version__} is installed: sweep all types"
        )
    if not asked and (again or version != transformers.__version__):
        record = {}
    record = {"transformers": transformers.__version__, "types": {}, "multimodal": {}, "variants": {}} | record
    names = {"types": model_types(), "multimodal": multimodal_types(), "variants": list(VARIANTS)}
    for kind, every in names.items():
        for name in every:
            if name in asked or (not asked and name not in record[kind]):
                record[kind][name] = asdict(verify(name))
                print(name, record[kind][name]["outcome"], flush=True)
                file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--newest", action="store_true")
    transformers.logging.set_verbosity_error()
    arguments = parser.parse_args()
    main(arguments.types, NEWEST if arguments.newest else RECORD, again=arguments.again)
