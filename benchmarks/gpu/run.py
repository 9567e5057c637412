"""What every stage works with: a device, models made here, clocks."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec import LLM, SamplingParams

from .figures import Figures
from .models import SHAPES, Shape, checkpoint, eagle3_checkpoint, named

BEST_OF = 10


@dataclass(frozen=True)
class Run:
    """One stage's."""

    figures: Figures
    models: Path
    device: torch.device
    deadline: float  # by `time.monotonic`; rounds end there, so that the stage comes to an end of its own
    smoke: bool

    @classmethod
    def make(cls, figures: Path, models: Path, limit: float, *, smoke: bool) -> Run:
        """Raises SystemExit where there is no device."""
        if not smoke and not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device; --smoke runs tiny models on a CPU")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        device = torch.device("cpu" if smoke else "cuda")
        return cls(Figures(figures), models, device, time.monotonic() + 0.75 * limit, smoke)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.smoke else torch.bfloat16

    def shape(self, name: str) -> Shape:
        """Of a model; in a rehearsal a tiny one stands in for each."""
        return SHAPES["smoke" if self.smoke else name]

    def checkpoint(self, name: str) -> Path:
        """Of a model in which each token is followed by its successor; made when it is first asked for."""
        folder = self.models / named("target", self.shape(name), self.dtype)
        return checkpoint(folder, self.shape(name), self.dtype, self.device)

    def eagle3(self, name: str) -> Path:
        """Of a drafter with random weights, as large as EAGLE-3's for this target."""
        folder = self.models / named("eagle3", self.shape(name), self.dtype)
        return eagle3_checkpoint(folder, self.shape(name), self.dtype, self.device)

    @contextmanager
    def engine(self, name: str, **settings: Any) -> Iterator[LLM]:
        """Over one of the models. Its memory is free once the caller has let it go and the next one is made."""
        self.free()
        shape = self.shape(name)
        defaults = {
            "model": str(self.checkpoint(name)),
            "device": str(self.device),
            "max_model_len": shape.max_model_len,
            "max_num_seqs": max(shape.batch_sizes),
            "prove_target": False,
            "enable_prefix_caching": False,  # prompts are repeated
            "kv_cache_memory_gib": shape.kv_gib,
        }
        with LLM(**defaults | settings) as llm:
            yield llm

    def free(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def prompts(self, name: str, count: int) -> list[dict[str, list[int]]]:
        """Of random tokens."""
        shape, generator = self.shape(name), torch.Generator().manual_seed(1)
        rows = torch.randint(0, 400, (count, shape.prompt_len), generator=generator).tolist()
        return [{"prompt_token_ids": row} for row in rows]

    def params(self, name: str, **changes: Any) -> SamplingParams:
        """Greedy, as long as the shape says."""
        settings = {"temperature": 0, "max_tokens": self.shape(name).output_len, "ignore_eos": True}
        return SamplingParams(**settings | {"detokenize": False} | changes)

    def bandwidth(self) -> float:
        """Bytes per second that a copy reads and writes: the best of ten."""
        num_bytes = 2**20 if self.smoke else 2**32
        source = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / min(self.seconds(lambda: target.copy_(source)) for _ in range(BEST_OF))

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], Any]) -> float:
        """How long the work takes, waited for."""
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def device_seconds(self, work: Callable[[], Any], times: int = 20) -> float:
        """Median of a call on the device. There one graph has all calls: a graph each would time its launches."""

        def calls() -> None:
            for _ in range(times):
                work()

        recorded = self._recorded(calls)
        recorded()
        return statistics.median(self.seconds(recorded) / times for _ in range(3))

    def _recorded(self, work: Callable[[], Any]) -> Callable[[], Any]:
        if self.device.type != "cuda":
            return work
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def steps(self, llm: LLM, name: str, batch: int, **changes: Any) -> list[float]:
        """Seconds of each decoding step of a whole batch, the first ones left out."""
        params, engine = self.params(name, **changes), llm.engine
        requests = [engine.get_request(engine.add_request(each, params)) for each in self.prompts(name, batch)]
        while not all(each.output_token_ids for each in requests):
            engine.step()
        found = []
        while all(each.finish_reason is None for each in requests):
            found.append(self.seconds(engine.step))
        while engine.has_unfinished_requests:
            engine.step()
        return found[3:] or found

    def is_late(self) -> bool:
        """Whether what is left undone should stay undone."""
        return time.monotonic() > self.deadline


def weight_bytes(folder: Path) -> int:
    """Of a checkpoint, without the embedding table: what a step at batch 1 has to read."""
    return int(json.loads((folder / "bytes.json").read_text())["weights"])
