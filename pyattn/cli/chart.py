"""The loss curve as a picture."""

from pathlib import Path

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
