"""Does the proposer keep specdec's contract? Every check is a test."""

import sysconfig
from pathlib import Path

import pytest
from specdec.testing import ProposerConformance

CORPUS = Path(sysconfig.get_path("stdlib")) / "json"


class TestRetrieval(ProposerConformance):
    proposer = "specdec_plugin_retrieval:RetrievalProposer"
    level = "full"

    @pytest.fixture(scope="class", autouse=True)
    def index(self, request, tmp_path_factory):
        index = tmp_path_factory.mktemp("retrieval") / "index"
        options = {"index": str(index), "corpus": str(CORPUS), "pattern": "*.py"}
        request.cls.speculative_config = {"proposer_config": options}
