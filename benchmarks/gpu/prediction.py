"""What a step should take on a GPU, worked out and not measured: our engine beside an estimate for vLLM.

    python3 -m benchmarks.gpu.prediction

A step is its parts, one after the other: the time in which the products' weights are read, the keys and values, the
small kernels between them, programs of attention that find nothing to do, and the host where the device waits for it.
What is assumed is printed with the prediction. Programs of attention are counted by the kernel's own rules, and kernels
of a layer as docs/decisions/0030 counts them. A drawn line is no measurement: where a device has been measured,
its figures count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import torch

from specdec.core.kernels.attention import Pages
from specdec.core.kernels.cuda.paged_attention import kernel

BATCH_SIZES = (1, 8, 64)
CONTEXT = 1024
MAX_MODEL_LEN = 131_072


@dataclass(frozen=True)
class Device:
    """An H200, as others measured it."""

    bytes_per_second: float = 4.3e12
    flops_per_second: float = 0.79e15
    processors: int = 132
    programs_per_processor: int = 2  # of attention: it takes about 200 registers a thread
    small_kernel: float = 1.8e-6  # seconds of one that does little, in a recorded step
    idle_program: float = 0.8e-6  # seconds of one that finds no keys; 0.45 to 1.2 were seen


@dataclass(frozen=True)
class Model:
    """Llama-3.1-8B in bfloat16."""

    layers: int = 32
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128_256
    heads: int = 32
    key_heads: int = 8
    dim: int = 128
    bytes_each: int = 2

    @property
    def weights(self) -> int:
        """Numbers that a step reads: every product's, and not the embedding table."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.key_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one position."""
        return 2 * self.layers * self.key_heads * self.dim * self.bytes_each


@dataclass(frozen=True)
class Engine:
    """What one engine makes of a device."""

    name: str
    small_kernels: int  # of a layer, products and attention aside
    gemm_share: float = 0.83  # of the bandwidth, or of the operations
    attention_share: float = 0.75  # of the bandwidth
    host: tuple[float, ...] = (0.1e-3, 0.1e-3, 0.1e-3)  # seconds, for each of BATCH_SIZES
    counts_programs: bool = True  # of our kernel


HOST = ((231 + 64) / 1.45e6, (302 + 96) / 1.45e6, (655 + 326) / 1.45e6)
"""Schedule and commit as they were timed on a small machine, whose core is 1.3 to 1.6 times as slow as a server's."""
GOAL = (150e-6, 250e-6, 400e-6)
"""What the host's part is meant to become; of batch 8 no goal says anything, and it lies between."""
ENGINES = (
    Engine("ours, as it comes", small_kernels=18, host=HOST),
    Engine("ours, torch_compile", small_kernels=6, host=HOST),
    Engine("ours, torch_compile, FlashAttention", 6, attention_share=0.85, host=HOST, counts_programs=False),
    Engine("the same, host as the goal says", 6, attention_share=0.85, host=GOAL, counts_programs=False),
)
VLLM = Engine("vLLM, estimated", small_kernels=6, attention_share=0.85, counts_programs=False)


def idle_seconds(device: Device, model: Model, batch: int, context: int, max_model_len: int) -> float:
    """Of programs without keys, in one layer of a decoding step."""
    one = torch.zeros(batch, dtype=torch.int32)
    pages = Pages(one[:, None], one, one, 16, 1, max_model_len)
    if not kernel.most_divided_of(pages):
        return 0.0
    count = batch * model.key_heads
    programs = kernel.num_programs(kernel.PARTS, count)
    idle = count * max(programs - -(-context // kernel.SEGMENT), 0)
    return idle * device.idle_program / (device.processors * device.programs_per_processor)


def step_parts(
    device: Device, model: Model, engine: Engine, batch: int, context: int = CONTEXT, max_model_len: int = MAX_MODEL_LEN
) -> dict[str, float]:
    """Seconds of each part of a decoding step."""
    reading = model.weights * model.bytes_each / device.bytes_per_second
    computing = 2 * model.weights * batch / device.flops_per_second
    keys = batch * context * model.kv_bytes / device.bytes_per_second
    joins = 1 if engine.counts_programs else 0
    idle = idle_seconds(device, model, batch, context, max_model_len) if engine.counts_programs else 0.0
    return {
        "products": max(reading, computing) / engine.gemm_share,
        "keys and values": keys / engine.attention_share,
        "small kernels": model.layers * (engine.small_kernels + joins) * device.small_kernel,
        "idle programs": model.layers * idle,
        "host": engine.host[BATCH_SIZES.index(batch)],
    }


def tokens_per_second(device: Device, model: Model, engine: Engine, batch: int, **length: int) -> float:
    """Of plain decoding."""
    return batch / sum(step_parts(device, model, engine, batch, **length).values())


def floor(device: Device, model: Model, batch: int) -> float:
    """Tokens per second if weights, keys and values are read once, and nothing else takes time."""
    num_bytes = model.weights * model.bytes_each + batch * CONTEXT * model.kv_bytes
    return batch * device.bytes_per_second / num_bytes


def lines(device: Device, model: Model) -> Iterator[str]:
    """The page: what is assumed, then what follows."""
    yield "Predicted, not measured. Assumed:"
    for what in (device, model, *ENGINES, VLLM):
        yield f"  {type(what).__name__}: " + ", ".join(f"{name}={value}" for name, value in asdict(what).items())
    yield f"Tokens per second of plain decoding, contexts of {CONTEXT}, max_model_len {MAX_MODEL_LEN}:"
    for batch in BATCH_SIZES:
        theirs = tokens_per_second(device, model, VLLM, batch)
        yield f"batch {batch}: floor {floor(device, model, batch):.0f}, {VLLM.name} {theirs:.0f}"
        for engine in ENGINES:
            found = [
                tokens_per_second(replace(device, idle_program=seconds), model, engine, batch)
                for seconds in (0.45e-6, 0.8e-6, 1.2e-6)
            ]
            parts = step_parts(device, model, engine, batch)
            told = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
            yield f"  {engine.name}: {found[2]:.0f} to {found[0]:.0f}, {found[1] / theirs:.2f} of vLLM's (ms: {told})"


if __name__ == "__main__":
    print("\n".join(lines(Device(), Model())))
