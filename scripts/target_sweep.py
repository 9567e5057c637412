"""Write the page "model types" of the docs: which of transformers' causal language models are served, and how truly.

python -m scripts.target_sweep              render docs/reference/targets.json again
python -m scripts.target_sweep --verify      verify all types of the installed transformers first (minutes)
python -m scripts.target_sweep --verify TYPE [TYPE ...]     only these

A type is verified by a small model with random weights: its greedy text, plain and with n-gram drafts, is compared with
that of `generate`, one request at a time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec import LLM, SamplingParams
from specdec.core.model.target import load_config
from specdec.sdk import SpecdecError

from .small_models import VOCAB_SIZE, NotBuildableError, model_types, small_config, small_model

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
RECORD = REFERENCE / "targets.json"
PAGE = REFERENCE / "targets.md"

PROMPT_LENGTHS = 5, 19, 45
NUM_TOKENS = 24
DRAFTS: Sequence[Mapping[str, Any] | None] = (None, {"method": "ngram", "num_speculative_tokens": 4})

HEAD = """\
# Model types that are served

Every type that transformers {version} registers for causal language models, verified by a small model with random
float32 weights on a CPU. Three prompts ({lengths} tokens) run in one batch, {tokens} greedy tokens each, with sliding
windows of 8 tokens. Their text, plain and with n-gram drafts, is compared with that of `generate` at batch 1. This page
is written by `python -m scripts.target_sweep`, and `.ci/full` verifies every type again.

| outcome | types |
|---|---|
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one type."""

    outcome: str  # "equal", "refused", "not buildable", and never "different"
    code: str | None = None  # of a refusal
    reason: str | None = None


def verify(model_type: str) -> Outcome:
    """Build a small model of this type, serve it, and compare. Raises whatever is no refusal."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = _saved(model_type, Path(folder))
            with torch.random.fork_rng():
                return _served(folder, model)
        except NotBuildableError as error:
            return Outcome("not buildable", reason=str(error))
        except SpecdecError as error:
            return Outcome("refused", error.code, _reason(error))


def _saved(model_type: str, folder: Path) -> Any:
    """A checkpoint in `folder`; its model. Raises NotBuildableError, UnsupportedModelError."""
    try:
        model = small_model(small_config(model_type))
    except NotBuildableError:
        _refuse_by_configuration(model_type, folder)
        raise
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
    expected = None
    for drafts in DRAFTS:
        llm = LLM(folder, max_model_len=128, block_size=4, max_num_seqs=4, speculative_config=drafts)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        served = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        ours = [list(each.outputs[0].token_ids) for each in served]
        expected = _generated(model, prompts) if expected is None else expected
        if ours != expected:
            return Outcome("different", reason="with drafts" if drafts else "plain")
    return Outcome("equal")


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


Record = Mapping[str, Mapping[str, Any]]


def page(record: Mapping[str, Any]) -> str:
    """How many of each outcome, then the types: those that are served in a line, the others with their reasons."""
    types: Record = record["types"]
    lengths = ", ".join(map(str, PROMPT_LENGTHS))
    head = HEAD.format(version=record["transformers"], lengths=lengths, tokens=NUM_TOKENS)
    kinds = {kind: [name for name in types if _kind(types[name]) == kind] for kind in map(_kind, types.values())}
    counts = "".join(f"| {kind} | {len(kinds[kind])} |\n" for kind in sorted(kinds))
    equal = "\n## Served\n\n" + ", ".join(f"`{name}`" for name in kinds["equal"]) + "\n"
    others = sorted((name for name in types if types[name]["outcome"] != "equal"), key=lambda name: _kind(types[name]))
    sections = [_section(kind, list(names), types) for kind, names in groupby(others, lambda name: _kind(types[name]))]
    return head + counts + equal + "".join(sections)


def _kind(shown: Mapping[str, Any]) -> str:
    return f"{shown['outcome']}: {shown['code']}" if shown["code"] else str(shown["outcome"])


def _section(kind: str, names: Sequence[str], types: Record) -> str:
    rows = "".join(f"| `{name}` | {_cell(types[name]['reason'])} |\n" for name in names)
    return f"\n## {kind[0].upper()}{kind[1:]}\n\n| type | reason |\n|---|---|\n{rows}"


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 160 else line[:160] + " ..."


def main(verified: Sequence[str] | None) -> None:
    """Verify the types, if any, and write the page."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"types": {}}
    if verified is not None:
        record["transformers"] = transformers.__version__
        record["types"] |= {name: asdict(verify(name)) for name in verified or model_types()}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(record))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--verify", nargs="*", metavar="TYPE")
    transformers.logging.set_verbosity_error()
    main(parser.parse_args().verify)
