"""The rows of a benchmark as a printed table."""

from collections.abc import Callable

from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.contention import is_busy
from pyattn.cli.rows import Row

REASON = 200
"""Most characters of a reason: two lines of a terminal, in which onnxruntime gets from its preamble to the matter."""

COLUMNS = {"forward": "forward ms", "forward_backward": "forward+backward ms"}


def spread(time: Row) -> str:
    """Half the interquartile range in percent of the median, or why it is not meaningful.

    On a busy machine rounds can agree to the microsecond and mean nothing: a barrier waits for a thread without a core
    until the scheduler's next tick, so times are multiples of 4 ms.
    """
    if is_busy(time["waited"]):
        return "busy"
    if time["rounds"] < 3:
        return f"{time['rounds']} round{'s' if time['rounds'] > 1 else ''}"
    return f"±{(time['high'] - time['low']) / 2 / time['seconds']:3.0%}"


RATES: dict[str, tuple[str, int, Callable[[float], str]]] = {
    "tokens_per_second": ("tokens/s", 10, lambda rate: f"{rate:,.1f}"),
    "bytes_per_second": ("GB/s", 7, lambda rate: f"{rate / 1e9:.1f}"),
    "of_peak": ("peak", 6, lambda share: f"{share:.0%}"),
    "flops_per_second": ("TFLOP/s", 9, lambda rate: f"{rate / 1e12:.1f}"),
}
"""A field of a time with its heading, the width of its column and its figure; the first that a time has is shown."""

ONE_TOKEN = ("tokens_per_second", "bytes_per_second")
"""Rates of comparisons without a backward, of one token a call."""


def show(rows: list[Row]) -> None:
    """Print one comparison."""
    times = [row[key] for row in rows for key in ("forward", "forward_backward") if key in row]
    rate = next((name for name in RATES if any(name in time for time in times)), "")
    heading, width, figure = RATES.get(rate, ("", 0, str))
    columns = {"forward": "token ms"} if rate in ONE_TOKEN else COLUMNS
    head = "".join(f"{name:>20}{'speed-up':>10}{heading:>{width}}" for name in columns.values())
    tqdm.write(f"\n{rows[0]['what']}\n{'':34}{head}" + ("" if rate in ONE_TOKEN else f"{'MB':>6}"))
    for row in rows:
        line = f"  {row['side']:32}"
        if "left_out" in row:
            tqdm.write(f"{line}  left out: {row['left_out'][:REASON]}")
            continue
        for key in columns:
            time = row.get(key)
            if time is None:
                line += " " * (30 + width)
            else:
                shown = figure(time[rate]) if rate in time else ""
                line += f"{1e3 * time['seconds']:12.3f}{spread(time):>8}{time['speedup']:9.2f}x{shown:>{width}}"
        memory = "" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**20:6.0f}"
        tqdm.write((line + memory).rstrip())


def worst_wait(rows: list[Row]) -> float:
    """The largest share of time that the threads of a comparison waited for a core."""
    shares = [row[key]["waited"] for row in rows for key in ("forward", "forward_backward") if key in row]
    return max((share for share in shares if share is not None), default=0.0)
