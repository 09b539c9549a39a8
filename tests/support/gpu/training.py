"""``pyattn train`` with our attention and with torch's, from the same seed: both learn, and learn the same."""

import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from support.gpu.build import output_of
from support.gpu.child import Check
from support.gpu.device import Device

ATTENTIONS = ("pyattn", "sdpa")
BOUND = 0.15
"""Nats per byte by which two losses may differ: over twice the observed difference, half of attention's contribution.
With this recipe, in float32 on a CPU, rounding grew until the two attentions were 0.06 apart, as two seeds of one were
by 0.05. Both ended 0.3 below the 2.48 of a model that looks back one byte only."""

Curve = dict[int, float]
"""Validation loss by the number of steps."""


def curve_of(attention: str, dtype: str, device: Device) -> Curve:
    command = [sys.executable, "-m", "pyattn", "train", "--device", device.name, "--dtype", dtype]
    with tempfile.TemporaryDirectory() as folder:
        shown = output_of([*command, "--attention", attention, *device.recipe, "--out", folder])
    curve = {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  validation loss (\S+)", shown)}
    (last,) = re.findall(r"^validation loss (\S+) nats", shown, re.MULTILINE)
    return curve | {int(device.recipe[device.recipe.index("--steps") + 1]): float(last)}


def largest_difference(curves: dict[str, Curve]) -> float:
    ours, theirs = curves.values()
    assert ours.keys() == theirs.keys()
    return max(abs(ours[step] - theirs[step]) for step in ours)


def train(dtype: str, device: Device) -> dict[str, Any]:
    """Trains with both attentions at once, because neither fills a GPU."""
    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(curve_of, name, dtype, device) for name in ATTENTIONS}
    curves = {name: curve.result() for name, curve in running.items()}
    difference = largest_difference(curves)
    assert difference <= BOUND, f"losses {difference:.3f} apart: {curves}"
    return {"validation_loss": curves, "largest_difference": round(difference, 4)}


def checks(device: Device) -> dict[str, Check]:
    return {dtype: partial(train, dtype, device) for dtype in device.dtypes[:2]}
