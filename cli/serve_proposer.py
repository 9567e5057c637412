"""`specdec serve-proposer`: one proposer in this process, which drafts for engines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.sdk import ConfigError
from specdec.sdk.addresses import require_private
from specdec.sdk.extensions import MOST_OUTCOMES
from specdec.sdk.extras import INSTALL_REMOTE, missing_of_remote
from specdec.sdk.keys import make_keys, read_server_key

from ._engine_options import FurtherKeysOption, only_one, silence_libraries
from ._option_blocks import NetworkOptions, with_blocks
from ._session import Session

if TYPE_CHECKING:
    from specdec.sdk.child_wire import AheadSetting


def _require_libraries() -> None:
    missing = missing_of_remote()
    if missing:
        raise ConfigError("SD-E330", f"{missing} is not installed", {"fix": INSTALL_REMOTE})


def _write_keys(path: Path | None) -> None:
    if path is not None:
        _require_libraries()
        print(f"{path} is the server's key, and {make_keys(path)} that of its clients: copy it to their machines")
        raise typer.Exit


@with_blocks
def command(  # noqa: PLR0913 - one parameter per flag
    ctx: typer.Context,
    proposer: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A name, distribution:name, package.module:Class or a checkpoint."),
    ],
    target: Annotated[
        str, typer.Option("--target", help="The model that is drafted for: a directory, a hub id, or tiny. Not loaded.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="ipc:///PATH, or tcp://127.0.0.1:PORT. PORT *: a free one.")
    ],
    speculative_config: FurtherKeysOption = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The server's key, for an address that other machines reach."),
    ] = None,
    new_key: Annotated[  # it has ended by now
        Path | None,
        typer.Option(
            "--new-key",
            metavar="FILE",
            callback=_write_keys,
            is_eager=True,
            help="Write the key of a server to FILE and that of its clients to FILE.client, and end.",
        ),
    ] = None,
    ahead: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Outcomes of a request's drafts that the next ones are prepared for meanwhile. 0: none.",
        ),
    ] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests of all clients that are held at a time.")] = 64,
    max_clients: Annotated[int, typer.Option(min=1, help="Engines that are served at a time.")] = 64,
    idle_seconds: Annotated[float, typer.Option(min=1, help="A client that is silent for longer is forgotten.")] = 600,
    *,
    networks: NetworkOptions,
    torch_compile: Annotated[
        bool, typer.Option("--torch-compile", help="Compile draft networks at the start.")
    ] = False,
) -> None:
    """Serve one proposer's drafts to engines that name its address. Ends at SIGTERM or Ctrl-C, with its state saved."""
    _require_libraries()
    require_private(listen, has_key=key is not None)
    server_key = None if key is None else read_server_key(key)
    silence_libraries()
    import torch

    from specdec.adapters.serving.hosted import Hosted, served_speculation
    from specdec.adapters.serving.server import Server
    from specdec.adapters.serving.sessions import Limits
    from specdec.adapters.serving.told_to_end import told_to_end
    from specdec.core.config.engine_config import EngineConfig
    from specdec.core.engine.plan import Plan
    from specdec.core.model.tokenizer import load_tokenizer

    settings = asdict(networks)
    num_threads = settings.pop("num_threads")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    session: Session = ctx.obj
    config = EngineConfig(model=target, max_num_seqs=max_num_seqs, **settings)
    plan, prepares = Plan.make(config, None, session.settings), _ahead(ahead)
    asked = _asked(proposer, speculative_config)
    speculation = served_speculation(asked, plan.info, session.settings, plan.hooks, prepares)
    tokenizer = load_tokenizer(None, plan.path, trust_remote_code=config.trust_remote_code)
    limits = Limits(max_clients, idle_seconds)
    told = plan.info, speculation, plan.hooks.observers, tokenizer, prepares
    with (
        plan.profile.current(),
        closing(Hosted(*told, torch_compile=torch_compile)) as hosted,
        closing(Server(hosted, listen, limits, key=server_key)) as server,
        told_to_end() as ended,
    ):
        print(f"{hosted.plugin} drafts for {target} at {server.address}", flush=True)
        server.serve(ended)


def _ahead(text: str) -> AheadSetting:
    if text == "auto":
        return "auto"
    if text.isdecimal() and int(text) <= MOST_OUTCOMES:
        return int(text)
    raise typer.BadParameter(f"auto, or 0 .. {MOST_OUTCOMES}; found {text!r}", param_hint="--ahead")


def _asked(proposer: str, further: Sequence[str] | None) -> dict[str, Any]:
    from specdec.core.config.speculative_config import SpeculativeConfig
    from specdec.testing.subject import is_checkpoint

    text = only_one("--speculative-config", further)
    keys = SpeculativeConfig.as_mapping(text) if text is not None else {}
    key = "model" if is_checkpoint(proposer) else "method"
    if keys.get(key, proposer) != proposer:
        raise typer.BadParameter(f"NAME is {proposer!r}, and --speculative-config has {key}={keys[key]!r}: name one.")
    return {key: proposer, **keys}
