"""Draws front.png, the chart of the front page, from results.json, which ``pyattn bench`` wrote."""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
SHAPES = ("8x128x64", "8x512x64", "4x1024x64", "2x2048x64", "1x4096x64")
DTYPES = {"float32": "#9ecae1", "bfloat16": "#08519c"}
PANELS = {"forward": "forward", "forward_backward": "training step (forward and backward)"}

rows = json.loads((HERE / "results.json").read_text())["results"]
found = {row["what"]: row for row in rows if row["side"] == "pyattn avx512_bf16"}
figure = Figure(figsize=(10, 3.4), dpi=140, layout="constrained")
for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
    for i, (dtype, color) in enumerate(DTYPES.items()):
        values = [found[f"1x{shape} {dtype}"][key]["speedup"] for shape in SHAPES]
        places = [n + 0.4 * i - 0.2 for n in range(len(SHAPES))]
        bars = axes.bar(places, values, 0.38, color=color, label=f"pyattn, {dtype}")
        axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
    axes.axhline(1, color="#d62728", linewidth=1.5, label="torch SDPA")
    axes.set_title(title, fontsize=11)
    axes.set_xticks(range(len(SHAPES)), [shape.replace("x", " x ") for shape in SHAPES], fontsize=8)
    axes.set_xlabel("heads x tokens x head_dim", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0, 5)
axes.legend(frameon=False, loc="upper center", ncols=3, fontsize=8)
figure.get_axes()[0].set_ylabel("times as fast as torch SDPA")
figure.savefig(HERE / "front.png")
