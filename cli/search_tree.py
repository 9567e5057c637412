"""`specdec search-tree`: the best static tree for Medusa heads, found on a recording."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from specdec.sdk import ConfigError

from ._engine_options import (
    RecordedModelOption,
    RecordingArgument,
    ReplayDeviceOption,
    SpeculativeOption,
    only_one,
    silence_libraries,
)
from ._option_blocks import OutputOptions, with_blocks


@with_blocks
def command(
    ctx: typer.Context,
    recording: RecordingArgument,
    speculative_config: SpeculativeOption = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Nodes of the tree.")] = 32,
    model: RecordedModelOption = None,
    device: ReplayDeviceOption = "cpu",
    *,
    output: OutputOptions,
) -> None:
    """Find the best static tree of Medusa's choices on a recording with hidden states, and what it would give."""
    how, quiet = output.form(ctx.obj)
    asked = only_one("--speculative-config", speculative_config)
    if asked is None:
        raise ConfigError("SD-E254", "there are no heads to search a tree for", {"fix": "name them with -sc"})
    silence_libraries()
    from specdec.core.config.speculative_config import SpeculativeConfig
    from specdec.lab.tree_search import search_tree

    found = search_tree(recording, asked, nodes, ctx.obj.settings, model=model, device=device)
    if how == "json":
        print(json.dumps(found))
        return
    settings = SpeculativeConfig.as_mapping(asked) | {"max_nodes": nodes, "medusa_choices": found["choices"]}
    print(json.dumps(settings))
    if not quiet:
        print(_expected(found), file=sys.stderr)


def _expected(found: Mapping[str, Any]) -> str:
    if found["expected_of_tree"] is None:
        return f"{found['num_places']} places of one request: record several to see what is expected of others"
    return (
        f"expected tokens per verification on requests that the tree was not searched on: "
        f"{found['expected_of_tree']:.2f}, of the chain {found['expected_of_chain']:.2f} ({found['num_places']} places)"
    )
