"""The lab in a notebook: results show themselves, and a run has a progress bar."""

import pytest
from recordings import make

from specdec.lab.notebook import bench, compare, compare_recorded, why
from specdec.sdk.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SMALL = {"num_prompts": 2, "output_len": 8, "repeat": 1, "warmup": 0}
CELLS = (
    "from specdec.lab.notebook import compare\n"
    "compare('tiny', [{'method': 'ngram'}], sweep={'num_speculative_tokens': [1, 2]}, num_prompts=2, output_len=8, "
    "repeat=1, warmup=0)",
)


@pytest.mark.slow
def test_results_are_html_and_make_reports(tmp_path):
    result = compare("tiny", [{"method": "ngram"}], sweep={"num_speculative_tokens": [1, 2]}, quiet=True, **SMALL)
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "ngram K=2" in html
    assert result.report(tmp_path / "out.html")[0].exists()
    assert "Speed-up" in bench("tiny", NGRAM, quiet=True, **SMALL)._repr_html_()


def test_a_misspelt_figure_is_refused_before_anything_runs(tmp_path):
    for call, subject in ((compare, tmp_path / "no model"), (compare_recorded, tmp_path / "no recording")):
        with pytest.raises(ConfigError, match="SD-E132") as error:
            call(subject, NGRAM, sort="speed-up")
        assert "did you mean  speedup" in str(error.value)


def test_recordings_take_one_proposer_or_several_and_sweeps(tmp_path):
    recording = make(tmp_path / "x", max_num_seqs=1, output_len=8, num_prompts=3)
    swept = compare_recorded(
        recording.folder, {"method": "ngram"}, sweep={"num_speculative_tokens": [1, 2]}, quiet=True
    )
    assert {row["label"] for row in swept["rows"]} == {"ngram K=1", "ngram K=2"}
    assert "Tokens per target step" in swept._repr_html_()
    explained = why(recording.folder, NGRAM, quiet=True)
    assert [row["label"] for row in explained["rows"]] == ["ngram K=3"]
    assert "Drafts accepted" in explained._repr_html_()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_runs_with_a_bar_and_tables():
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    done = client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    shown = [
        "".join(str(output.get("data", {})) for output in cell.outputs if output.output_type != "stream")
        for cell in done.cells
    ]
    assert "text/html" in shown[0]
    assert "ngram K=2" in shown[0]
    assert "application/vnd.jupyter.widget-view+json" in shown[0]
