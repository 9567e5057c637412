"""Whether the SGLang at hand is one that this adapter was written for: its version, and every signature relied on."""

from __future__ import annotations

from importlib.metadata import version

from ..written_for import Names, check_engine, differences, folder_of

TRIED_VERSIONS = ("0.5.23",)

_MODULE = "srt/speculative/ngram_worker.py"

PARAMETERS: Names = {
    f"{_MODULE}:NGRAMWorker.__init__": "self, server_args, gpu_id, nccl_port, target_worker",
    f"{_MODULE}:NGRAMWorker.alloc_memory_pool": "self",
    f"{_MODULE}:NGRAMWorker.clear_cache_pool": "self",
    f"{_MODULE}:NGRAMWorker._prepare_draft_tokens": "self, batch",
    f"{_MODULE}:NGRAMWorker._update_ngram_corpus": "self, batch",
    "srt/speculative/base_spec_worker.py:BaseSpecWorker.note_request_finished": "self, rid, natural_stop",
}
"""Methods of SGLang's worker that are overridden, and their parameters."""

MEMBERS: Names = {f"{_MODULE}:": "NgramCorpus"}
"""What is replaced in SGLang's module."""


def check_sglang() -> None:
    """Raise PluginLoadError SD-E195 if a signature differs; warn of a version that nobody tried."""
    differing = differences(folder_of("sglang"), PARAMETERS, MEMBERS)
    check_engine("SGLang", version("sglang"), TRIED_VERSIONS, differing)
