"""Charts: the loss curve of a training, the speed-ups of a benchmark, the weights of heads."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from pyattn.cli import output

if TYPE_CHECKING:
    from pyattn.cli.fit import Losses  # fit needs tqdm, which pictures don't


def _save(figure: Figure, path: Path) -> None:
    """Writes ``figure`` as a PNG, complete or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    output.write(path, picture.getvalue())


def _plain(axes: Axes) -> None:
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(losses: "Losses", unigram_loss: float, title: str, path: Path) -> None:
    """Write ``losses`` as a PNG, with the unigram loss for comparison. Needs no display."""
    figure = Figure(figsize=(8, 5), dpi=150)  # 1200 x 750 pixels, sharp in a README
    axes = figure.add_subplot()
    train, validation = losses.train, losses.validation
    axes.plot(list(train), list(train.values()), color="#9ecae1", linewidth=1, label="training, each step")
    axes.plot(list(validation), list(validation.values()), color="#08519c", marker=".", label="validation")
    axes.axhline(unigram_loss, color="#7f7f7f", linestyle=":", label="byte frequencies alone")
    axes.set(title=title, xlabel="step", ylabel="cross entropy (nats per byte)")
    axes.set_ylim(bottom=0)
    _plain(axes)
    axes.legend(frameon=False, loc="upper right")  # losses fall; matplotlib's search for a place takes seconds
    _save(figure, path)


def _bars(axes: Axes, rows: list[dict[str, Any]], key: str, title: str, base: str) -> None:
    """Draws speed-ups over ``base``: one group of bars per comparison, one bar per side."""
    rows = [row for row in rows if key in row]
    whats = list(dict.fromkeys(row["what"] for row in rows))
    sides = list(dict.fromkeys(row["side"] for row in rows))
    colors = {side: f"C{i}" for i, side in enumerate(side for side in sides if "pyattn" in side)}
    others = [side for side in sides if side not in colors]
    grays = {side: str(0.35 + 0.5 * i / len(others)) for i, side in enumerate(others)}
    width = 0.8 / len(sides)
    for i, side in enumerate(sides):
        values = {row["what"]: row[key]["speedup"] for row in rows if row["side"] == side}
        places = [whats.index(what) + (i - (len(sides) - 1) / 2) * width for what in values]
        axes.bar(places, list(values.values()), width, label=side, color=(colors | grays)[side])
    axes.axhline(1, color="#7f7f7f", linewidth=0.8)
    labels = [what.removeprefix("module ").replace(", " if ", " in what else " ", "\n") for what in whats]
    axes.set_xticks(range(len(whats)), labels, fontsize=8)
    axes.tick_params("x", rotation=30 if len(whats) > 8 else 0)
    axes.set(title=title, ylabel=f"speed-up over {base}")
    axes.margins(x=0.01)
    _plain(axes)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")


def draw_speedups(rows: list[dict[str, Any]], title: str, base: str, path: Path) -> None:
    """Write the rows of :mod:`pyattn.cli.rows` as a PNG, functions above modules. Needs no display."""
    modules = [row for row in rows if row["what"].startswith("module")]
    functions = [row for row in rows if row not in modules]
    panels = [
        (functions, "forward", "attention, forward"),
        (functions, "forward_backward", "attention, forward and backward"),
        (modules, "forward_backward", "multi-head modules, forward and backward"),
    ]
    panels = [panel for panel in panels if any(panel[1] in row for row in panel[0])]
    figure = Figure(figsize=(12, 0.4 + 3 * len(panels)), dpi=140, layout="constrained")
    figure.suptitle(title)
    for i, panel in enumerate(panels):
        _bars(figure.add_subplot(len(panels), 1, i + 1), *panel, base)
    _save(figure, path)


PANEL, DPI = (4.0, 4.2), 120
"""Width and height in inches of one head's panel, and pixels per inch."""

MOST_PIXELS = 2**16 - 1
"""matplotlib's limit on the sides of a picture, in pixels."""

LABELS = 40
"""Most labels on an axis: a 7-point character takes 0.1 of the panel's 4 inches."""


def draw_weights(
    weights: Tensor, labels: Sequence[str], layers: Sequence[int], heads: Sequence[int], path: Path
) -> None:
    """Write ``weights`` (layers, heads, S, S) as a PNG: a row of panels per layer, a panel per head.

    Colours follow the square root of a weight, so a weight of 1/100, as in a long text, still shows. Needs no display.
    """
    width, height = PANEL[0] * len(heads) + 1, PANEL[1] * len(layers) + 0.6
    dpi = min(DPI, MOST_PIXELS / max(width, height))
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    panels = figure.subplots(len(layers), len(heads), squeeze=False)
    shades = LinearSegmentedColormap.from_list("weights", ["white", "#9ecae1", "#3182bd", "#08306b"])
    places = range(0, len(labels), -(-len(labels) // LABELS))
    signs = [labels[i] for i in places]
    for (row, column), axes in zip(((i, j) for i in layers for j in heads), panels.flat, strict=True):
        values = weights[layers.index(row), heads.index(column)]
        image = axes.imshow(values.float().numpy(), cmap=shades, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        axes.set_title(f"layer {row}, head {column}", fontsize=10)
        axes.set_xticks(places, signs, fontsize=7, family="monospace")
        axes.set_yticks(places, signs, fontsize=7, family="monospace")
        axes.tick_params(length=0, pad=2)
    for axes in panels[:, 0]:
        axes.set_ylabel("query")
    for axes in panels[-1]:
        axes.set_xlabel("key")
    figure.colorbar(image, ax=panels, label="weight", shrink=0.8 / len(layers), aspect=20)
    _save(figure, path)
