"""The picture of a roofline."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from pyattn.cli import output
from pyattn.cli.profile.roofline import Machine, Point

COLORS = {"forward": "#3182bd", "backward": "#e6550d"}
MARKS = "osD^vP*"
"""A mark for each product of a pass, in order."""


def draw(found: Sequence[Point], limits: Machine, title: str, path: Path) -> None:
    """Write the points with operations as a PNG, under the peak and the bandwidths; a line of text for the others."""
    products = [point for point in found if point.flops and point.bytes]
    figure = Figure(figsize=(8, 5.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    ridge = limits.peak / limits.read
    low = min([ridge, *(point.intensity for point in products)]) / 4
    high = max([ridge, *(point.intensity for point in products)]) * 4
    for name, bandwidth, style in (("read", limits.read, "-"), ("copy", limits.copy, ":")):
        corner = limits.peak / bandwidth
        label = f"{name} {bandwidth / 1e9:.1f} GB/s"
        axes.plot([low, corner], [low * bandwidth / 1e9, limits.peak / 1e9], style, color="#555555", label=label)
    axes.plot([ridge, high], [limits.peak / 1e9] * 2, "-", color="black", label=f"peak {limits.peak / 1e9:.0f} GFLOP/s")
    for pass_name, color in COLORS.items():
        mine = [point for point in products if point.pass_name == pass_name]
        for point, mark in zip(mine, MARKS, strict=False):
            whole = point.phase == "all"
            label = f"{pass_name}: {point.phase}, {point.rate / limits.bound(point.intensity):.0%} of the bound"
            axes.plot(
                point.intensity,
                point.rate / 1e9,
                marker=mark,
                markersize=11 if whole else 7,
                markerfacecolor="none" if whole else color,
                color=color,
                linestyle="none",
                label=label,
            )
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("operations a byte (bytes of tensors, once a call)")
    axes.set_ylabel("GFLOP/s of a thread")
    axes.set_title(f"{title}\n{_others(found)}", fontsize=9)
    axes.grid(which="both", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=7.5, loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    output.write(path, picture.getvalue())


def _others(found: Sequence[Point]) -> str:
    """The phases without a product, each with its share of its pass's time."""
    whole = {point.pass_name: point.seconds for point in found if point.phase == "all"}
    shares = {
        name: ", ".join(
            f"{point.phase} {point.seconds / whole[name]:.0%}"
            for point in found
            if point.pass_name == name and not point.flops
        )
        for name in whole
    }
    return "without products: " + "; ".join(f"{name} {share}" for name, share in shares.items() if share)
