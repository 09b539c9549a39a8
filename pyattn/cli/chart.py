"""Pictures: the loss curve of training, the speed-ups of a benchmark."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyattn.cli.fit import Losses


def draw(losses: Losses, unigram_loss: float, title: str, path: Path) -> None:
    """Write ``losses`` as a PNG, with the loss of byte frequencies alone for scale. Needs no display."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")  # 1200 x 750 pixels, sharp in a README
    axes = figure.add_subplot()
    train, validation = losses.train, losses.validation
    axes.plot(list(train), list(train.values()), color="#9ecae1", linewidth=1, label="training, each step")
    axes.plot(list(validation), list(validation.values()), color="#08519c", marker=".", label="validation")
    axes.axhline(unigram_loss, color="#7f7f7f", linestyle=":", label="byte frequencies alone")
    axes.set(title=title, xlabel="step", ylabel="cross entropy (nats per byte)")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def _bars(axes: Axes, rows: list[dict[str, Any]], key: str, title: str) -> None:
    """A group of bars for each comparison, one for each side, on the speed-up over torch's sdpa."""
    whats = list(dict.fromkeys(row["what"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        values = {row["what"]: row[key]["speedup"] for row in rows if row["side"] == side and row.get(key)}
        places = [whats.index(what) + (i - (len(sides) - 1) / 2) * width for what in values]
        color = f"C{i}" if "pyattn" in side else str(0.55 + 0.08 * (i % 4))
        axes.bar(places, list(values.values()), width, label=side, color=color)
    axes.axhline(1, color="#7f7f7f", linewidth=0.8)
    axes.set_xticks(range(len(whats)), whats, rotation=30, ha="right")
    axes.set(title=title, ylabel="speed-up over torch's sdpa")
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_speedups(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Write the rows of :mod:`pyattn.cli.bench` as a PNG, forward above the whole. Needs no display."""
    figure = Figure(figsize=(14, 10), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1)
    measured = [row for row in rows if "left_out" not in row and not row["what"].startswith("module")] or [
        row for row in rows if "left_out" not in row
    ]
    _bars(above, measured, "forward", f"forward: {title}")
    _bars(below, measured, "forward_backward", "forward and backward")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=8)
    figure.savefig(path)
