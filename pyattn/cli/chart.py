"""Charts: the loss curve of a training, the weights of heads."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from pyattn.cli import output

if TYPE_CHECKING:
    from pyattn.cli.train.loop import Losses  # fit needs tqdm, which pictures don't


def _save(figure: Figure, path: Path) -> None:
    """Writes ``figure`` as a PNG, complete or not at all."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    output.write(path, picture.getvalue())


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
    axes.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right")  # losses fall; matplotlib's search for a place takes seconds
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
