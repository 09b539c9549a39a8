"""Draws ranks.png: results.json, which ``pyattn bench --only distributed`` wrote, and the peaks of ranks_memory.py."""

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
PHASES = {"forward": "#9ecae1", "forward_backward": "#08519c"}
# Largest peak of a rank in MiB at 65,536 positions, 1 head of 64, float32, forward and backward, by number of ranks: as
# glibc frees memory by default, and with MALLOC_MMAP_THRESHOLD_=65536 (not run on 1 rank).
PEAKS = {1: (184.3, None), 2: (148.8, 116.8), 4: (150.5, 75.2), 8: (97.6, 51.7)}

rows = json.loads((HERE / "results.json").read_text())["results"]
ring = {row["what"].split()[1]: row for row in rows if row["side"] == "pyattn ring_attention"}
figure = Figure(figsize=(10, 3.2), dpi=140, layout="constrained")
speed, memory = figure.subplots(1, 2)
for i, (phase, color) in enumerate(PHASES.items()):
    values = [row[phase]["speedup"] for row in ring.values()]
    bars = speed.bar(
        [n + 0.4 * i - 0.2 for n in range(len(ring))], values, 0.38, color=color, label=phase.replace("_", " and ")
    )
    speed.bar_label(bars, fmt="%.2f", fontsize=8, padding=1)
speed.axhline(1, color="#d62728", linewidth=1.5, label="one process, two threads")
speed.set_xticks(range(len(ring)), [f"{int(length):,} positions" for length in ring], fontsize=8)
speed.set_title("speed of two ranks of one thread, gloo", fontsize=11)
speed.set_ylim(0, 1.5)
speed.legend(frameon=False, fontsize=8, loc="upper center", ncols=3)
for column, label in enumerate(("glibc's default", "memory returned at once")):
    points = [(ranks, peaks[column]) for ranks, peaks in PEAKS.items() if peaks[column] is not None]
    memory.plot(*zip(*points, strict=True), marker="o", label=label)
memory.set_xscale("log", base=2)
memory.set_xticks(list(PEAKS), [str(ranks) for ranks in PEAKS])
memory.set_ylim(0)
memory.set_xlabel("ranks", fontsize=8)
memory.set_ylabel("MiB", fontsize=8)
memory.set_title("peak memory of a rank, 65,536 positions", fontsize=11)
memory.legend(frameon=False, fontsize=8)
for axes in (speed, memory):
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(HERE / "ranks.png")
