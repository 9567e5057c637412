"""Plugins that were built for a version of the contract, as their wheels are: they draft, and change no text.

The folder of a version has sources and wheels. `scripts/frozen_wheels.py` built them, and nobody does again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import importlib_metadata
import pytest
from scripts.frozen_wheels import build

from specdec import LLM, SamplingParams
from specdec.testing import check_proposer

HERE = Path(__file__).parent
VERSIONS = sorted(each.name for each in HERE.iterdir() if (each / "host").is_dir())
METHODS = ["frozen_host", "frozen_head", "frozen_tree", "frozen_combinator", "frozen_device", "frozen_registered"]
PROMPTS = ["def read_lines(path):\n    with open(path) as file:\n", "for i in range(10):\n", "import os\nimport os\n"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = GREEDY.replace(temperature=0.8, seed=3)
SETTINGS = {"max_model_len": 128, "max_num_seqs": 2}
BUILDERS = (".dist-info/WHEEL", ".dist-info/RECORD")  # name the tool that built them


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def site(version, tmp_path_factory):
    """All of a version's, as pip would lay them out."""
    folder = tmp_path_factory.mktemp("site")
    for wheel in (HERE / version).glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in [name for name in sys.modules if name.startswith("frozen_")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def plain():
    llm = LLM("tiny", **SETTINGS)
    return [texts(llm.generate(PROMPTS, params)) for params in (GREEDY, SEEDED)]


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def engine(method, **more):
    config = {"method": method, "num_speculative_tokens": 3, "on_proposer_error": "raise"} | more
    return LLM("tiny", speculative_config=config, **SETTINGS)


def figure(llm, name):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"specdec:{name}")


def drafted(llm):
    return figure(llm, "spec_decode_num_draft_tokens")


def contents(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist() if not name.endswith(BUILDERS)}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_holds_its_sources_and_is_small(version):
    wheels = sorted((HERE / version).glob("*.whl"))
    assert len(wheels) == len(list((HERE / version).glob("*/pyproject.toml"))) == 6
    for wheel in wheels:
        assert wheel.stat().st_size < 10_000
        name = wheel.name.split("-")[0].removeprefix("specdec_")
        source = HERE / version / name.removeprefix("frozen_") / f"{name}.py"
        assert contents(wheel)[f"{name}.py"] == source.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_building_them_anew_gives_the_same_files(version, tmp_path):
    build(version, tmp_path)
    for wheel in sorted((HERE / version).glob("*.whl")):
        assert contents(tmp_path / wheel.name) == contents(wheel)


def test_each_is_written_for_its_version(version, site):
    for name in METHODS[:-1]:
        [point] = importlib_metadata.entry_points(group="specdec.proposers", name=name)
        assert point.load().api_version == version


@pytest.mark.parametrize("method", METHODS)
def test_it_drafts_and_the_text_is_that_of_plain_decoding(method, site, plain):
    llm = engine(method)
    assert [texts(llm.generate(PROMPTS, params)) for params in (GREEDY, SEEDED)] == plain
    assert drafted(llm) > 0


def test_a_head_draws_its_drafts_and_greedy_text_stays(site, plain):
    llm = engine("frozen_head", draft_sample_method="probabilistic")
    assert texts(llm.generate(PROMPTS, GREEDY)) == plain[0]
    llm.generate(PROMPTS, SEEDED)
    assert drafted(llm) > 0


def test_a_tree_has_branches_and_what_was_learned_is_kept(site, plain, tmp_path):
    accepted = []
    for _ in range(2):
        with engine("frozen_tree", max_nodes=6, state_dir=str(tmp_path)) as llm:
            assert texts(llm.generate(PROMPTS, GREEDY)) == plain[0]
            assert drafted(llm) > 3 * figure(llm, "spec_decode_num_drafts"), "nodes beside the longest path"
            accepted.append(figure(llm, "spec_decode_num_accepted_tokens"))
    assert accepted[1] > accepted[0], "it has read these texts"


def test_its_hooks_are_called(site):
    import frozen_hooks

    frozen_hooks.counts.clear()
    llm = engine("frozen_host")
    llm.generate(PROMPTS, GREEDY)
    assert frozen_hooks.counts["drafted"] == drafted(llm)
    assert frozen_hooks.counts["finished"] == len(PROMPTS)
    assert min(frozen_hooks.counts[name] for name in ("prompt tokens", "steps", "verified", "accepted")) > 0


def test_its_figures_and_the_options_of_requests_are_read(site, plain):
    llm = engine("frozen_host")
    none = GREEDY.replace(extra_args={"specdec": {"most": 0}})
    assert texts(llm.generate(PROMPTS, none)) == plain[0]
    assert drafted(llm) == 0
    assert figure(llm, "proposer_frozen_host_found") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"), [*((each, {}) for each in METHODS[:-1]), ("frozen_tree", {"max_nodes": 6})]
)
def test_the_kit_finds_nothing(method, settings, site):
    results = check_proposer(method, settings)
    assert [result.text for result in results if not result.ok] == []


def test_a_process_of_its_own_lists_them(site):
    command = [sys.executable, "-m", "specdec", "list"]
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [method for method in METHODS[:-1] if method not in done.stdout] == []
