"""Block verification of one request, written to be read; `verify_block` must return what this returns."""

from __future__ import annotations

from specdec.core.rejection import NO_PROPOSAL

from .reference import Step, draw


def survivals(steps: list[Step], drafts: list[int]) -> list[float]:
    """P_0 .. P_n of the drafts that can be verified: a hole and a bad row end the block."""
    found = [1.0]
    for step, x in zip(steps, drafts, strict=False):
        if x == NO_PROPOSAL or step.bad:
            break
        assert step.q is not None
        possible = 0 <= x < len(step.p) and float(step.p[x]) > 0 and float(step.q[x]) != 0
        ratio = float(step.p[x] / step.q[x]) if possible else 0.0
        found.append(min(1.0, found[-1] * ratio) if found[-1] > 0 else 0.0)
    return found


def verify_block_request(steps: list[Step], drafts: list[int], uniforms: list[float]) -> list[int]:
    """The output ids of one sampled request whose every draft comes with its distribution; uniforms[i] belongs to
    draft i.
    """
    survival = survivals(steps, drafts)
    last = len(survival) - 1
    stop = 0
    for i in range(last, 0, -1):
        threshold = survival[i]
        if i < last:
            mass = float(steps[i].residual(survival[i]).sum())
            threshold = mass / (mass + 1 - survival[i]) if mass > 0 else 0.0
        if uniforms[i - 1] < threshold:
            stop = i
            break
    step, token = steps[stop], steps[stop].target_token()
    if stop < last:
        weights = step.residual(survival[stop])
        token = draw(weights, step.output_uniform) if float(weights.sum()) > 0 else token
    return [*drafts[:stop], token]
