"""Write the pages of docs/reference/ that are read off the code: python -m scripts.reference_docs"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import importlib_metadata
from pydantic import BaseModel
from typer.cli import get_docs_for_click
from typer.main import get_command

import specdec
import specdec.sdk
from scripts.described import described, docstring, keys, table
from specdec import testing
from specdec.adapters import export, transformers
from specdec.adapters.foreign.vllm_keys import offered_keys, refused_values, vllm_keys
from specdec.cli._app import build_app
from specdec.core import llm
from specdec.core.config.engine_config import EngineConfig
from specdec.core.config.sampling_params import SamplingParams
from specdec.core.config.speculative_config import SpeculativeConfig
from specdec.core.engine import outputs
from specdec.lab import notebook
from specdec.lab.run import RunSettings
from specdec.sdk import (
    checkpoint,
    combinators,
    config,
    distribution_kind,
    errors,
    extensions,
    hooks,
    host_proposer,
    late_proposer,
    model_proposer,
    needs,
    proposer_protocol,
    services,
    trees,
    typed,
    types,
)
from specdec.sdk.config import StructuredOutputs
from specdec.sdk.proposer_protocol import Proposer, ProposerBase

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
WRITTEN = "\nThis page is read off the code by `python -m scripts.reference_docs`.\n"
PROPOSERS = "specdec.proposers"
IN_HOOKS = ("Registry", "hookimpl")
HOOK_TYPES = ("StepStats", "VerifiedRequest", "VerifiedStep", "CheckedProposer", "hookspec")
BESIDE = (
    *("Checkpoint", "DistributionForm", "DraftSampleMethod", "LateOptions", "Placement", "SamplingField"),
    *("CheckpointError", "IntegrityError", "PluginId", "PluginLoadError", "RequestError", "UnsupportedModelError"),
)
"""Public names of the modules of `specdec.sdk` that it does not export itself."""
OURS = "specdec-sdk"


EXAMPLE = """```python
from specdec.sdk import Draft, Needs, ProposerConfig, StepView


class Again:
    \"\"\"Drafts that the newest 24 tokens come once more.\"\"\"

    api_version = "1.0"
    needs = Needs(history=True)

    def __init__(self, config: ProposerConfig) -> None:
        self.num_draft_tokens = config.num_draft_tokens

    def propose(self, step: StepView) -> Draft:
        texts = [step.history.token_ids(place) for place in range(len(step))]
        drafts = [text[-24:][:budget] for text, budget in zip(texts, step.budget.tolist())]
        return Draft.from_lists(drafts, step.width)
```
"""


def contract() -> str:
    """The contract on one screen: an example, what a class has, what it may need, and the names."""
    methods = [
        (f"`{name}`", _first(getattr(Proposer if name == "propose" else ProposerBase, name)))
        for name in _methods(ProposerBase)
    ]
    names = [(_link(name), _first(value) if inspect.isclass(value) else "") for name, value in _exported()]
    places = "[In full](contract-in-full.md), [its extensions](extensions.md), [its versions](versions.md)"
    return "\n".join(
        [
            f"# The contract\n\nOn one screen. {places}.\n{WRITTEN}",
            EXAMPLE,
            "## What a class has\n\nEverything is optional but `__init__` and `propose`.\n",
            table(("method", ""), [("`__init__(config)`", "Gets a `ProposerConfig`."), *methods]),
            "\n## What it may need\n",
            table(("field of `Needs`", "default", ""), _needed()),
            "\n## The names of `specdec.sdk`\n",
            table(("name", ""), names),
            "",
        ]
    )


def _exported() -> list[tuple[str, object]]:
    return [(name, getattr(specdec.sdk, name)) for name in specdec.sdk.__all__]


def _link(name: str) -> str:
    page = "hooks" if name in IN_HOOKS else "contract-in-full"
    return f"[`{name}`]({page}.md#{name.lower()})"


def _needed() -> list[tuple[str, str, str]]:
    fields = needs.Needs.model_fields
    return [(f"`{name}`", f"`{field.default!r}`", field.description or "") for name, field in fields.items()]


def _methods(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")]


def _first(thing: object) -> str:
    """The first sentence of a docstring."""
    return docstring(thing).partition("\n\n")[0].replace("\n", " ")


def contract_in_full() -> str:
    """What `specdec.sdk` exports, module by module; hooks have their own page."""
    modules = {
        "The proposer": proposer_protocol,
        "A base for plain Python": host_proposer,
        "A base for answers that come late": late_proposer,
        "Needs": needs,
        "The data that crosses": types,
        "Kinds of distributions": distribution_kind,
        "Services": services,
        "Configuration": config,
        "Checkpoints": checkpoint,
        "Errors": errors,
    }
    beside = "[extensions](extensions.md), and [hooks](hooks.md)"
    sections = [f"# The contract in full\n\n`from specdec.sdk import ...`, {beside}.\n{WRITTEN}"]
    for title, module in modules.items():
        sections += [f"## {title}\n\n{docstring(module)}\n", *described(module, [*specdec.sdk.__all__, *BESIDE])]
    return "\n".join(sections)


def extensions_page() -> str:
    """What `specdec.sdk.extensions` exports, one module after the other."""
    sections = [f"# Extensions\n\n{docstring(extensions)}\n{WRITTEN}"]
    sections += ["## What every extension is\n", *described(config, ["Extension"])]
    for module in _homes(extensions):
        sections += [f"## {docstring(module)}\n", *described(module, extensions.__all__)]
    return "\n".join(sections)


def hooks_page() -> str:
    """Hook specifications, and the types that they use."""
    intro = f"# Hooks\n\n{docstring(hooks)}\n\n[How to write them](../how-to/observe-a-run.md).\n{WRITTEN}"
    specifications = described(hooks, ["HookSpecs"])
    others = described(hooks, [*specdec.sdk.__all__, *HOOK_TYPES])
    return "\n".join([intro, "## Specifications\n", *specifications, "## Names for them\n", *others])


def configuration() -> str:
    """`speculative_config`, the engine's settings, and the options of the packaged proposers."""
    sections = [
        f"# Configuration\n{WRITTEN}",
        _keys_of("speculative_config", SpeculativeConfig, "`LLM(speculative_config=...)`, in a shell `-sc JSON`."),
        _keys_of("Engine", EngineConfig, "`LLM(model, ...)`."),
        _keys_of("Sampling", SamplingParams, "`LLM.generate(prompts, SamplingParams(...))`."),
        _keys_of("StructuredOutputs", StructuredOutputs, "`SamplingParams(structured_outputs=...)`."),
        "## Options of the packaged proposers\n",
        "Keys of `proposer_config`. `specdec info NAME` shows those of any proposer.\n",
    ]
    for entry in sorted(importlib_metadata.distribution(OURS).entry_points.select(group=PROPOSERS)):
        options = getattr(entry.load(), "Options", None)  # optional by contract
        if options is not None:
            sections.append(f"### {entry.name}\n\n{keys(options)}\n")
    sections += [SETTINGS_IN_VLLM, _vllm_keys()]
    return "\n".join(sections)


SETTINGS_IN_VLLM = """## Settings inside vLLM

`additional_config["specdec"]` of vLLM takes the keys of [speculative_config](#speculative_config), without
`num_speculative_tokens`, `draft_sample_method` and `rejection_sample_method`, which are keys of vLLM's own
`speculative_config`. The default of `on_proposer_error` is `disable` there. It also takes:

| key | takes | default |  |
| --- | --- | --- | --- |
| `retry_after_steps` | integer at least 0 | `1000` | steps until a switched-off proposer is called again; 0: never |
| `hang_seconds` | number above 0 | `30.0` | a call of the proposer that has not returned by then is named in the log |

[How to run a proposer inside vLLM](../how-to/run-in-vllm.md) has examples.
"""


def _vllm_keys() -> str:
    """What becomes of each key of vLLM's."""
    intro = """## vLLM's keys

Each key of vLLM's `speculative_config` (0.32, and older ones that are still written down). `null` is always accepted. A
proposer whose options declare a key answers it itself."""
    rows = [(f"`{name}`", "accepted", "") for name in offered_keys()]
    for name, key in vllm_keys().items():
        same = ", ".join(f"`{json.dumps(value)}`" for value in key.same)
        rows.append((f"`{name}`", f"{same}: so already" if same else "refused", f"{key.reason}. Here: {key.here}"))
    for name, values in refused_values().items():
        rows += [(f'`{name}: "{value}"`', "refused", text) for value, text in values.items()]
    return f"{intro}\n\n{table(('key', 'answer', 'otherwise, why not and what to do'), rows)}\n"


def _keys_of(title: str, model: type[BaseModel], where: str) -> str:
    return f"## {title}\n\n{where} {docstring(model)}\n\n{keys(model)}\n"


def engine() -> str:
    """What `specdec` exports; sampling parameters are on the page of configuration."""
    intro = f"# The engine\n\n`from specdec import ...`, and [SamplingParams](configuration.md#sampling).\n{WRITTEN}"
    sections = [*described(llm, specdec.__all__), *described(outputs, specdec.__all__)]
    return "\n".join([intro, "## Names\n", *sections])


def helpers() -> str:
    """The packages below the contract that export names."""
    sections = [f"# Bases, combinators, testing, adapters\n{WRITTEN}"]
    for package in (model_proposer, combinators, testing, transformers, export):
        sections.append(f"## {package.__name__}\n\n{docstring(package)}\n")
        for module in _homes(package):
            sections += described(module, package.__all__)
    for module in (trees, typed):
        sections += [f"## {module.__name__}\n\n{docstring(module)}\n", *described(module, module.__all__)]
    return "\n".join(sections)


def lab() -> str:
    """What notebooks and scripts call."""
    intro = f"# The lab from Python\n\n`from specdec.lab.notebook import ...`. {docstring(notebook)}\n{WRITTEN}"
    fields = _keys_of("Settings of a run", RunSettings, "Of `bench` and `compare`, beside those of `EngineConfig`.")
    names = ["bench", "compare", "compare_recorded", "why", "Result"]
    here = fields.replace("(#engineconfig)", "(configuration.md#engine)")
    return "\n".join([intro, "## Functions\n", *described(notebook, names), here])


def command_line() -> str:
    """typer's own description of every verb."""
    command = get_command(build_app())
    context = command.make_context("specdec", ["list"], resilient_parsing=True)
    text = get_docs_for_click(obj=command, ctx=context, name="specdec", title="Command line")
    return text.replace("```console\n$ ", "```text\n").rstrip() + "\n" + EXIT_CODES + WRITTEN


EXIT_CODES = """
## Exit codes

All commands use the same codes. `specdec explain CODE` says which one an error has.

| code | meaning |
|---|---|
| 0 | it is done. Of `check`: every check passed, was skipped, or failed as expected |
| 1 | a check of `check` failed; outputs that should equal plain decoding's differ; a proposer failed; a bug of ours |
| 2 | a wrong argument, setting, file or request |
| 3 | a proposer or plugin cannot be found, imported or called, or does not fit the engine or the target |
| 4 | the target cannot be served. `doctor`: something is wrong with this machine or installation |
"""


def _homes(package: ModuleType) -> Sequence[ModuleType]:
    """The modules in which what a package exports is declared, in the order of its names."""
    values = (getattr(package, name) for name in package.__all__)
    homes = dict.fromkeys(value.__module__ for value in values if inspect.isclass(value) or inspect.isfunction(value))
    return [import_module(home) for home in homes if home.startswith(package.__name__)]


PAGES: dict[str, Callable[[], str]] = {
    "contract.md": contract,
    "contract-in-full.md": contract_in_full,
    "extensions.md": extensions_page,
    "hooks.md": hooks_page,
    "configuration.md": configuration,
    "engine.md": engine,
    "helpers.md": helpers,
    "lab.md": lab,
    "command-line.md": command_line,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
