"""Flags that every verb with an engine has, and silence from the libraries beneath it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.sdk import ConfigError

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A directory, a hub id, or tiny: the packaged model.")
]
SpeculativeOption = Annotated[
    list[str] | None,  # of which `only_one` may be there
    typer.Option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='The proposer, for example \'{"method": "NAME", "num_speculative_tokens": 5}\'. None: plain decoding.',
    ),
]
FurtherKeysOption = Annotated[
    list[str] | None,  # of which `only_one` may be there
    typer.Option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help='Further keys, for example \'{"model": "./checkpoint", "num_speculative_tokens": 5}\'.',
    ),
]
RecordingArgument = Annotated[
    Path, typer.Argument(metavar="RECORDING", help="A folder that `specdec record` has written.")
]
RecordedModelOption = Annotated[
    str | None, typer.Option("--model", help="The target's checkpoint, if it lies elsewhere than when recorded.")
]
ReplayDeviceOption = Annotated[str, typer.Option("--device", help="Where draft networks run: cpu, cuda or cuda:N.")]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")]
DATASETS = "packaged|custom|spec_bench|mt_bench|speed_bench|humaneval|sharegpt|NAME"
DATASET_HELP = (
    'custom: JSONL with "prompt", "turns", "prompt_token_ids" or "messages" and, if you like, "category"; '
    "spec_bench, mt_bench: question.jsonl, every turn of it; speed_bench: a split, as Parquet or JSONL; "
    "humaneval: its JSONL; sharegpt: a JSON array; NAME: one that a distribution offers."
)
DatasetOption = Annotated[
    str, typer.Option("--dataset", "--dataset-name", metavar=f"{DATASETS}[=FILE]", help=DATASET_HELP)
]
DatasetPathOption = Annotated[Path | None, typer.Option(help="The file of the dataset, if --dataset names none.")]


def dataset_settings(text: str, path: Path | None) -> dict[str, Any]:
    """What --dataset NAME[=FILE] and --dataset-path say, as fields of RunSettings. Raises BadParameter for two."""
    name, equals, file = text.partition("=")
    if equals and path is not None:
        raise typer.BadParameter(f"--dataset {text} and --dataset-path {path} name a file each.")
    return {"dataset_name": name, "dataset_path": Path(file) if file else path}


def silence_libraries() -> None:
    """Keep progress bars and remarks of the libraries off the terminal. Imports transformers and the hub client."""
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()  # the hub client's too
    their_logging.set_verbosity_error()
    for chatty in ("torchao", "torch.utils._pytree"):  # transformers imports torchao where it is installed
        logging.getLogger(chatty).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|huggingface_hub)(\.|$)")


def given_beside(ctx: typer.Context, names: Collection[str]) -> list[str]:
    """The flags that stand on the command line beside the parameters of these names."""
    return [
        each.opts[0]
        for each in ctx.command.params
        if each.name is not None and each.name not in names
        if str(getattr(ctx.get_parameter_source(each.name), "name", "")) == "COMMANDLINE"
    ]


def only_one(flag: str, given: Sequence[str] | None, fix: str = "one run for each") -> str | None:
    """The value of a flag that may be given once, or None. Raises ConfigError SD-E186: else the last would win."""
    if not given:
        return None
    if len(given) > 1:
        facts = {f"number {number}": text for number, text in enumerate(given, start=1)}
        raise ConfigError("SD-E186", f"{flag} is given {len(given)} times", facts | {"fix": fix})
    return given[0]
