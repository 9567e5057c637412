import sys
import textwrap

import pytest

from specdec.sdk import TargetInfo
from specdec.sdk.extensions import KNOWN

PROPOSER = """
class Mine:
    def __init__(self, config):
        self.config = config
    def propose(self, step):
        return None
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder on the import path; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def write_module(site):
    def write(name, source=PROPOSER):
        path = site.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def install(site):
    """Write the metadata of a distribution: its entry points as "name = value" lines, its requirements."""

    def write(name, version="1.0", proposers=(), plugins=(), others=None, requires=(), entry_points=None):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        groups = {"specdec.proposers": proposers, "specdec.plugins": plugins} | (others or {})
        text = "".join(f"[{group}]\n" + "\n".join(items) + "\n" for group, items in groups.items() if items)
        (folder / "entry_points.txt").write_text(text if entry_points is None else entry_points)

    return write


@pytest.fixture
def target():
    return TargetInfo(
        model="some/target",
        checkpoint_dir=None,
        config={},
        vocab_size=1000,
        hidden_size=64,
        num_layers=6,
        num_kv_heads=2,
        head_dim=16,
        dtype="float32",
        device="cpu",
        max_model_len=256,
        max_num_seqs=8,
        block_size=16,
        extensions=frozenset(KNOWN),
        max_nodes=64,
    )
