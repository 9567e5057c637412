"""The training loop of every tiny model: Muon with AdamW, steps not minutes, one seed, bf16 autocast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from .batching import Batch, TokenStream

AFTER_STEP = Callable[[int, float], None]  # (steps done, mean loss of the step in nats)
OUTER_MATRICES = ("embed_tokens", "lm_head", "mlp.gate.", "markov_head", "confidence_head")  # in names of parameters


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run: the same recipe on the same text gives the same weights on one machine.

    The learning rate rises linearly for `warmup_steps`, stays, and falls linearly to zero over the last
    `decay_fraction` of the run; the last `long_fraction` of the steps sees windows of `long_length` tokens.
    """

    steps: int
    seed: int = 1
    tokens_per_step: int = 4096
    length: int = 256
    long_length: int = 1024
    long_fraction: float = 0.1
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    warmup_steps: int = 60
    decay_fraction: float = 0.4

    @property
    def long_steps(self) -> int:
        return int(self.steps * self.long_fraction)

    def lr_factor(self, step: int) -> float:
        """The learning rate of `step` (0-based) as a fraction of the full one."""
        rise = (step + 1) / self.warmup_steps
        fall = (self.steps - step) / (self.steps * self.decay_fraction)
        return min(1.0, rise, fall)

    def batches(self, stream: TokenStream) -> Iterator[Batch]:
        """One batch per step: the short windows, then the long ones."""
        short = stream.batches(length=self.length, num_tokens=self.tokens_per_step, seed=self.seed)
        long = stream.batches(length=self.long_length, num_tokens=self.tokens_per_step, seed=self.seed + 1)
        yield from islice(short, self.steps - self.long_steps)
        yield from islice(long, self.long_steps)


@dataclass(frozen=True)
class Effort:
    steps: int
    tokens: int
    cpu_seconds: float
    wall_seconds: float


def train(
    module: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    stream: TokenStream,
    recipe: Recipe,
    after_step: AFTER_STEP,
) -> Effort:
    """Train what requires gradients in `module` on `loss_of(batch)`, a scalar in nats per token."""
    optimizers = make_optimizers(module, recipe)
    module.train()
    cpu, wall = time.process_time(), time.perf_counter()
    for step, batch in enumerate(recipe.batches(stream)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * recipe.lr_factor(step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        after_step(step + 1, loss.item())
    return Effort(
        steps=recipe.steps,
        tokens=recipe.steps * recipe.tokens_per_step,
        cpu_seconds=time.process_time() - cpu,
        wall_seconds=time.perf_counter() - wall,
    )


def make_optimizers(module: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the hidden matrices; AdamW for embeddings, heads, routers, norms, biases and stacked experts."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    outer = {id(parameter) for name, parameter in trained if any(part in name for part in OUTER_MATRICES)}
    hidden = [parameter for _, parameter in trained if parameter.ndim == 2 and id(parameter) not in outer]
    rest = [parameter for _, parameter in trained if parameter.ndim != 2 or id(parameter) in outer]
    muon = torch.optim.Muon([{"params": hidden, "full_lr": recipe.muon_lr}], lr=recipe.muon_lr)
    adamw = torch.optim.AdamW(
        [{"params": rest, "full_lr": recipe.adamw_lr}],
        lr=recipe.adamw_lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    return muon, adamw


@torch.no_grad()
def mean_loss(
    module: nn.Module,
    loss_of: Callable[[Batch], Tensor],
    stream: TokenStream,
    *,
    length: int,
    num_tokens: int = 4096,
) -> float:
    """The mean of `loss_of` over the whole stream in windows of `length`, in nats per token, fp32."""
    was_training = module.training
    module.eval()
    total, count = 0.0, 0
    for batch in stream.in_order(length=length, num_tokens=num_tokens):
        total += loss_of(batch).item() * batch.next_ids.numel()
        count += batch.next_ids.numel()
    module.train(was_training)
    return total / count
