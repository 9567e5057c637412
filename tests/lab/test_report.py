"""Reports: what stands on the page and beside it, and that a browser shows it."""

import copy
import csv
import json
import re
import shutil
import subprocess

import pytest

from specdec.core.config.engine_config import EngineConfig
from specdec.core.registry import PluginSettings
from specdec.lab.comparison import Sweep, run_compare, variants
from specdec.lab.progress import NoProgress
from specdec.lab.report import write_report
from specdec.lab.run import BenchSettings, RunSettings, run_bench

SMALL = {"num_prompts": 3, "output_len": 16, "repeat": 1, "warmup": 0}
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
NETWORK = re.compile(r"""(?:src|href)\s*=\s*["'](?:https?:)?//|@import|url\(\s*["']?https?:""")


@pytest.fixture(scope="module")
def result():
    """A comparison of four, with stages timed."""
    engine = EngineConfig(model="tiny", max_num_seqs=1, enable_profiling=True)
    asked = variants([{"method": "ngram"}, {"method": "suffix"}], [Sweep("num_speculative_tokens", (1, 3))])
    return run_compare(RunSettings(engine=engine, **SMALL), asked, PluginSettings(), NoProgress(), "speedup")


@pytest.fixture(scope="module")
def written(result, tmp_path_factory):
    return write_report(result, tmp_path_factory.mktemp("report") / "out.html")


def data_of(page, name):
    return json.loads(re.search(rf'id="data-{name}">(.*?)</script>', page, re.DOTALL)[1])


@pytest.mark.slow
def test_files_lie_beside_the_page(written, result):
    assert [path.name for path in written] == ["out.html", "out.json", "out.csv", "out.acceptance.csv"]
    assert json.loads(written[1].read_text()) == json.loads(json.dumps(result))


def test_the_page_needs_no_network(written):
    page = written[0].read_text()
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)  # the library names its project's pages
    assert not NETWORK.search(own)
    assert "<script src" not in page
    assert "<link" not in own


def test_figures_are_those_of_the_result(written, result):
    rows = list(csv.DictReader(written[2].read_text().splitlines()))
    total = {row["proposer"]: row for row in rows if row["category"] == "all"}
    for row in result["rows"]:
        assert float(total[row["label"]]["speedup"]) == row["speedup"]
        assert float(total[row["label"]]["speedup_low"]) == row["speedup_interval"][0]
        assert int(total[row["label"]]["num_draft_tokens"]) == row["num_draft_tokens"]
    figures = {each["name"]: each["figure"] for each in data_of(written[0].read_text(), "figures")}
    assert set(figures) == {"acceptance", "by_length", "step_time", "drafts"}
    first = figures["acceptance"]["data"][0]
    assert first["name"] == result["rows"][0]["label"]
    assert first["y"] == result["rows"][0]["acceptance_per_position"]
    assert figures["by_length"]["data"][0]["x"] == [1, 3]
    assert "The target&#39;s probabilities were not kept" in written[0].read_text()


def test_the_page_says_how_far_rows_are_apart_who_drafted_and_when(result, tmp_path):
    again = copy.deepcopy(result)
    again["configuration"]["times"] = "predicted"
    again["rows"][0]["source_sha256"] = "a" * 64
    again["rows"][1]["speculative_config"] = {"method": "ngram", "proposer_config": {"prompt_lookup_min": 3}}
    page = write_report(again, tmp_path / "out.html")[0].read_text()
    own = page.partition('id="data-figures"')[0]
    for shown in ("Differences on the same prompts", "95 % interval, paired", "Times are predicted", "aaaaaaaaaaaa"):
        assert shown in own
    assert "{&#34;prompt_lookup_min&#34;: 3}" in own
    assert re.search(r"Written \d{4}-\d\d-\d\d \d\d:\d\d UTC", own)
    assert "num_draft_tokens" not in own
    assert "drafts accepted" in own
    (points,) = [each["figure"]["data"] for each in data_of(page, "figures") if each["name"] == "drafts"]
    assert not any("text" in each["mode"] for each in points)
    assert {each["name"] for each in points} >= {row["label"] for row in again["rows"]}


def test_sources_of_proposers_are_told_apart(result):
    sources = {row["proposer"]: row["source_sha256"] for row in result["rows"]}
    assert len({*sources.values(), None}) == 3


def test_acceptance_has_the_columns_of_speculators(written, result):
    rows = list(csv.DictReader(written[3].read_text().splitlines()))
    names = ["subset", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length"]
    assert list(rows[0])[:5] == names
    assert list(rows[0])[5:] == ["acceptance_at_pos_0", "acceptance_at_pos_1", "acceptance_at_pos_2"]
    label = result["rows"][0]["label"]
    mine = [row for row in rows if row["subset"].startswith(f"{label}/")]
    assert sum(int(row["num_accepted_tokens"]) for row in mine) == result["rows"][0]["num_accepted_tokens"]


def test_requests_have_the_names_of_vllm(result):
    for row in result["rows"]:
        for request in row["requests"]:
            drafted, accepted = request["per_step_drafted"], request["per_step_accepted"]
            assert len(drafted) == len(accepted) == len(request["per_step_draft_token_ids"])
            assert sum(request["acceptance_histogram"]) == sum(each > 0 for each in drafted)
            assert sum(n * count for n, count in enumerate(request["acceptance_histogram"])) == sum(accepted)
        assert sum(sum(each["per_step_accepted"]) for each in row["requests"]) == row["num_accepted_tokens"]


def test_a_text_ends_no_script_element(result, tmp_path):
    bad = copy.deepcopy(result)
    bad["token_texts"] = dict.fromkeys(bad["token_texts"], "</script><script>alert(1)</script>")
    bad["rows"][0]["label"] = "<b>bold</b>"
    page = write_report(bad, tmp_path / "out.html")[0].read_text()
    assert "alert(1)</script>" not in page
    assert "<b>bold</b>" not in page
    assert set(data_of(page, "texts").values()) == {"</script><script>alert(1)</script>"}


def test_a_plain_benchmark_has_a_page_too(tmp_path):
    settings = BenchSettings(engine=EngineConfig(model="tiny"), baseline="off", **SMALL)
    page = write_report(run_bench(settings, PluginSettings(), NoProgress()), tmp_path / "out.html")[0].read_text()
    assert "Nothing was drafted." in page


def in_browser(page, theme, tmp_path):
    """The page's document after its scripts have run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / theme}"]
    command += ["--virtual-time-budget=5000", "--dump-dom", f"file://{page}?theme={theme}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


@needs_browser
@pytest.mark.full
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_plot_and_the_tokens(written, result, theme, tmp_path):
    shown = in_browser(written[0], theme, tmp_path)
    assert f'data-theme="{theme}"' in shown
    assert 'data-ready="yes"' in shown
    assert shown.count('class="main-svg"') >= 4
    tokens = re.search(r'<div id="text">(.*?)</div>', shown, re.DOTALL)[1]
    first = result["rows"][0]["requests"][0]
    drafted, accepted = sum(first["per_step_drafted"]), sum(first["per_step_accepted"])
    assert tokens.count('class="accepted"') == accepted
    assert tokens.count('class="rejected"') == drafted - accepted
    assert tokens.count("<span") == drafted - accepted + len(first["output_token_ids"])


@needs_browser
@pytest.mark.full
def test_a_browser_shows_the_branches_of_trees(tmp_path):
    asked = {"model": "tiny/medusa", "max_nodes": 12}
    settings = BenchSettings(engine=EngineConfig(model="tiny"), speculative_config=asked, baseline="off", **SMALL)
    result = run_bench(settings, PluginSettings(), NoProgress())
    shown = in_browser(write_report(result, tmp_path / "out.html")[0], "light", tmp_path)
    tokens = re.search(r'<div id="text">(.*?)</div>', shown, re.DOTALL)[1]
    first = result["requests"][0]
    met = [
        (parents or [])[count:].count(count - 1)  # what stood at the end of the accepted path
        for parents, count in zip(first["per_step_draft_parents"], first["per_step_accepted"], strict=True)
    ]
    assert max(met) > 1
    assert tokens.count('class="accepted"') == sum(first["per_step_accepted"])
    assert tokens.count('class="rejected"') == sum(met)
    assert "in a tree of 12" in tokens
    assert "beside it: " in tokens


@needs_browser
@pytest.mark.full
def test_a_thousand_prompts_are_shown(result, tmp_path):
    many = copy.deepcopy(result)
    many["rows"] = many["rows"][:1]
    request = many["rows"][0]["requests"][0]
    many["rows"][0]["requests"] = [request | {"prompt_id": f"p{number}"} for number in range(1000)]
    page = write_report(many, tmp_path / "out.html")[0]
    shown = in_browser(page, "light", tmp_path)
    assert 'data-ready="yes"' in shown
    assert "p999" in shown
