"""The commands export-data and evaluate-head."""

import json

import pytest
from typer.testing import CliRunner

from specdec.cli._app import build_app

HEAD = '{"model": "tiny/eagle3", "num_speculative_tokens": 2}'


def invoke(*arguments):
    return CliRunner().invoke(build_app(), [*map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "x"
    layers = "2,4,5,8,final"
    small = ("--num-prompts", 1, "--output-len", 8, "--no-cost", "-q")
    assert invoke("record", "tiny", "-o", path, *small, "--hidden-states", layers).exit_code == 0
    return path


def test_both_formats_are_written(folder, tmp_path):
    done = invoke("export-data", folder, "-o", tmp_path / "a", "--layers", "4,2")
    assert done.stdout == f"{tmp_path / 'a'}: 1 text, hidden states 4, 2, 8\n"
    done = invoke("export-data", folder, "-o", tmp_path / "b", "--format", "specforge", "--compress", "-q")
    assert (done.exit_code, done.stdout) == (0, "")
    assert [each.name for each in (tmp_path / "b").rglob("*.gz")] == ["data_0.ckpt.gz"]


@pytest.mark.parametrize("layers", ["two", "²"])
def test_layers_that_are_no_numbers_are_refused(layers, folder, tmp_path):
    done = invoke("export-data", folder, "-o", tmp_path / "a", "--layers", layers)
    assert done.exit_code == 2
    assert "layers are numbers" in done.stderr
    assert not (tmp_path / "a").exists()


def test_a_heads_agreement_is_shown_row_by_row(folder):
    rows = json.loads(invoke("evaluate-head", folder, folder, "-sc", HEAD, "--no-live", "--json").stdout)
    assert [(row["how"], row["data"], len(row["depths"])) for row in rows] == [
        ("teacher-forced", "training", 2),
        ("teacher-forced", "held-out", 2),
        ("replay", "held-out", 2),
    ]
    for row in rows:
        for share, (agreed, tried), (low, high) in zip(row["depths"], row["counts"], row["intervals"], strict=True):
            assert share == (agreed / tried if tried else 0)
            assert low <= share <= high
        assert row["counts"][1][1] <= row["counts"][0][0]  # a depth is reached where the one before it agreed
    lines = invoke("evaluate-head", folder, folder, "-sc", HEAD, "--no-live").stdout.splitlines()
    share, (low, high), (_, tried) = (rows[0][name][0] for name in ("depths", "intervals", "counts"))
    assert f"{share:.3f} ({low:.3f}-{high:.3f}) of {tried}" in lines[1].split("\t")
    assert lines[0].split("\t") == ["how", "data", "depth 1", "depth 2"]


def test_an_evaluation_without_a_head_is_refused(folder):
    done = invoke("evaluate-head", folder, folder)
    assert done.exit_code == 2
    assert "SD-E251" in done.stderr
