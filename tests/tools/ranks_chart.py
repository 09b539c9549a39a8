"""Draws ranks.png in a folder of tests/records: ``ranks_chart.py FOLDER``.

results.json is what ``pyattn bench --only distributed`` wrote. peaks.json has, by number of ranks, the largest peak of
a rank in MiB, from ranks_memory.py: as glibc frees memory by default, and with MALLOC_MMAP_THRESHOLD_=65536.
"""

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(sys.argv[1])
PHASES = {"forward": "#9ecae1", "forward_backward": "#08519c"}

rows = json.loads((FOLDER / "results.json").read_text())["results"]
peaks = {int(ranks): pair for ranks, pair in json.loads((FOLDER / "peaks.json").read_text()).items()}
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
    points = [(ranks, pair[column]) for ranks, pair in peaks.items() if pair[column] is not None]
    memory.plot(*zip(*points, strict=True), marker="o", label=label)
memory.set_xscale("log", base=2)
memory.set_xticks(list(peaks), [str(ranks) for ranks in peaks])
memory.set_ylim(0)
memory.set_xlabel("ranks", fontsize=8)
memory.set_ylabel("MiB", fontsize=8)
memory.set_title("peak memory of a rank, 65,536 positions", fontsize=11)
memory.legend(frameon=False, fontsize=8)
for axes in (speed, memory):
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(FOLDER / "ranks.png")
