"""The rows of a benchmark as a printed table."""

from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.contention import is_busy
from pyattn.cli.rows import Row


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


def rate(time: Row) -> str:
    """Tokens a second, percent of peak, or TFLOP/s where no peak is measured; empty for modules."""
    if "tokens_per_second" in time:
        return f"{time['tokens_per_second']:,.1f}"
    if "flops_per_second" not in time:
        return ""
    return f"{time['of_peak']:.0%}" if "of_peak" in time else f"{time['flops_per_second'] / 1e12:.1f}"


def show(rows: list[Row], device: str) -> None:
    """Print one comparison."""
    rate_head, rate_width = ("TFLOP/s", 9) if device == "cuda" else ("peak", 6)
    columns, memory = ["forward ms", "forward+backward ms"], f"{'MB':>6}"
    if any("tokens_per_second" in row.get("forward", ()) for row in rows):
        columns, memory, rate_head, rate_width = ["token ms"], "", "tokens/s", 10
    head = "".join(f"{name:>20}{'speed-up':>10}{rate_head:>{rate_width}}" for name in columns)
    tqdm.write(f"\n{rows[0]['what']}\n{'':34}{head}{memory}")
    for row in rows:
        line = f"  {row['side']:32}"
        if "left_out" in row:
            tqdm.write(f"{line}  left out: {row['left_out'][:80]}")
            continue
        for key in ("forward", "forward_backward"):
            time = row.get(key)
            if time is None:
                line += " " * (30 + rate_width)
            else:
                line += (
                    f"{1e3 * time['seconds']:12.3f}{spread(time):>8}{time['speedup']:9.2f}x{rate(time):>{rate_width}}"
                )
        tqdm.write(line + ("" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**20:6.0f}"))


def worst_wait(rows: list[Row]) -> float:
    """The largest share of time that the threads of a comparison waited for a core."""
    shares = [row[key]["waited"] for row in rows for key in ("forward", "forward_backward") if key in row]
    return max((share for share in shares if share is not None), default=0.0)
