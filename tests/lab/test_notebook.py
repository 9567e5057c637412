"""The lab in a notebook: results show themselves, and a run has a progress bar."""

import pytest
from recordings import make

from specdec import LLM, SamplingParams
from specdec.core.engine.outputs import CompletionOutput
from specdec.core.request.metrics import RequestMetrics
from specdec.lab.notebook import bench, compare, compare_recorded, why

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SMALL = {"num_prompts": 2, "output_len": 8, "repeat": 1, "warmup": 0}
CELLS = (
    "from specdec import LLM, SamplingParams\n"
    "llm = LLM('tiny', speculative_config={'method': 'ngram', 'num_speculative_tokens': 3})\n"
    "llm",
    "llm.generate(['def main('], SamplingParams(temperature=0, max_tokens=8))[0]",
    "from specdec.lab.notebook import compare\n"
    "compare('tiny', [{'method': 'ngram'}], sweep={'num_speculative_tokens': [1, 2]}, num_prompts=2, output_len=8, "
    "repeat=1, warmup=0)",
)


def test_outputs_and_engines_are_html():
    with LLM("tiny", speculative_config=NGRAM) as llm:
        output = llm.generate([[300, 301, 302]], SamplingParams(temperature=0, max_tokens=8))[0]
        assert "draft tokens accepted" in output._repr_html_()
        assert "<table>" in llm._repr_html_()
        assert "spec_decode_num_drafts" in llm._repr_html_()


def test_a_text_is_shown_as_text():
    output = CompletionOutput(
        index=0,
        text="<b>",
        token_ids=(1,),
        finish_reason="stop",
        stop_reason=None,
        logprobs=None,
        spec_decode_metrics=RequestMetrics().as_dict(),
    )
    assert "&lt;b&gt;" in output._repr_html_()


def test_results_are_html_and_make_reports(tmp_path):
    result = compare("tiny", [{"method": "ngram"}], sweep={"num_speculative_tokens": [1, 2]}, quiet=True, **SMALL)
    html = result._repr_html_()
    assert html.count("<tr>") == 3
    assert "ngram K=2" in html
    assert result.report(tmp_path / "out.html")[0].exists()
    assert "Speed-up" in bench("tiny", NGRAM, quiet=True, **SMALL)._repr_html_()


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
    assert all("text/html" in each for each in shown)
    assert "draft tokens accepted" in shown[1]
    assert "ngram K=2" in shown[2]
    assert "application/vnd.jupyter.widget-view+json" in shown[2]
