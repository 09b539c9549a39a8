"""``pyattn bench``: time and memory of attention, and of multi-head modules, beside PyTorch's.

All sides run in turn in one process. Speed-ups are medians of the ratios within a round; percent are of the peak of
multiply-adds measured in the same run with the same instruction set. Counted as work is the causal half of the scores:
forward 2 B H T (T + 1) D floating-point operations, backward 2.5 times as many. MB is what resident memory rises by.

On a GPU, where no peak is measured, TFLOP/s stand in place of percent: the same work over the time, which is the GPU's
own, and MB is what torch allocates at most.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn import _C
from pyattn.cli import InputError, contenders, info
from pyattn.cli.chart import draw_speedups
from pyattn.cli.device import DEVICES, check_device, cpu, hardware
from pyattn.cli.timing import in_turn, peak_flops, peak_memory

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in info.DTYPES}
SHAPES = {
    "cpu": ["1x8x128x64", "1x8x512x64", "1x4x1024x64", "1x2x2048x64", "1x1x4096x64", "1x4x1024x32", "1x4x1024x128"],
    "cuda": [f"{bht}x{d}" for bht in ("4x16x2048", "2x16x4096", "1x16x8192", "1x16x16384") for d in (64, 128)],
}
QUICK_SHAPES = {"cpu": ["1x8x128x64", "1x4x1024x64"], "cuda": ["4x16x2048x64", "4x16x2048x128"]}
MODULES = ((8, 256, 256, 8), (4, 1024, 768, 12))
"""batch, seqlen, width, heads: a small model's, and GPT-2 small's."""
LARGEST_SCORES = 2**30
"""Bytes of a score matrix beyond which the function that makes one is left out."""

Call = Callable[[], Any]
Row = dict[str, Any]
Peaks = dict[tuple[str, str], float]
"""FLOP/s by dtype and instruction set."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="pyattn bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = "; ".join(f"on {device} {' '.join(shapes)}" for device, shapes in SHAPES.items())
    parser.add_argument("--shapes", nargs="+", metavar="BxHxTxD", help=f"of the functions; default: {defaults}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"], help="of all inputs")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where to measure; default: %(default)s")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--only", choices=("functions", "modules"), help="leave the other out")
    parser.add_argument("--quick", action="store_true", help="two shapes, one module, a tenth of the time")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which is compiled first")
    parser.add_argument("--out", type=Path, help="folder for results.json and speedups.png; default: none is written")
    return parser.parse_args(argv)


def shape_of(text: str) -> tuple[int, ...]:
    """B, H, T and D of ``BxHxTxD``."""
    sizes = tuple(int(n) if n.isdecimal() else 0 for n in text.split("x"))
    if len(sizes) != 4 or min(sizes) < 1:
        raise InputError("--shapes must be of the form BxHxTxD, each at least 1", text)
    return sizes


def usable(calls: dict[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """Those that return, and why the others don't."""
    good, reasons = {}, {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # whatever another library raises where it can't
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            good[name] = call
    return good, reasons


def measure(what: str, forwards: dict[str, Call], trainings: dict[str, Call], seconds: float, device: str) -> list[Row]:
    """A row for each side: its forward, and its forward and backward."""
    with torch.no_grad():
        forwards, reasons = usable(forwards)
        base = next(name for name in forwards if "sdpa" in name)
        forward_times = in_turn(forwards, base, seconds, device)
    trainings, more_reasons = usable({name: trainings[name] for name in forwards})
    training_times = in_turn(trainings, base, 2 * seconds, device)
    rows: list[Row] = []
    for name, time in forward_times.items():
        row: Row = {"what": what, "side": name, "forward": dataclasses.asdict(time)}
        if name in trainings:
            row["forward_backward"] = dataclasses.asdict(training_times[name])
            row["peak_bytes"] = peak_memory(trainings[name], device)
        rows.append(row)
    reasons |= {f"{name}, backward": reason for name, reason in more_reasons.items()}
    return rows + [{"what": what, "side": name, "left_out": reason} for name, reason in reasons.items()]


def function_rows(options: argparse.Namespace, shape: tuple[int, ...], dtype: str, peaks: Peaks) -> list[Row]:
    """The functions at one shape and dtype."""
    batch, heads, seqlen, head_dim = shape
    device = options.device
    q, k, v = (torch.randn(shape, dtype=DTYPES[dtype], device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def both(attention: contenders.Attention) -> Any:
        return torch.autograd.grad(attention(q, k, v), (q, k, v), dout)

    functions = contenders.functions(device, options.flex)
    if batch * heads * seqlen**2 * q.itemsize > LARGEST_SCORES:
        del functions["plain torch"]
    forwards: dict[str, Call] = {n: partial(f, q.detach(), k.detach(), v.detach()) for n, f in functions.items()}
    trainings: dict[str, Call] = {n: partial(both, f) for n, f in functions.items()}
    what = f"{'x'.join(map(str, shape))} {dtype}"
    rows = measure(what, forwards, trainings, 0.1 if options.quick else 1.0, device)
    flops = 2 * batch * heads * seqlen * (seqlen + 1) * head_dim
    by_isa = {isa: peak for (of, isa), peak in peaks.items() if of == dtype}
    for row in rows:
        for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
            if key in row:
                rate = row[key]["flops_per_second"] = share * flops / row[key]["seconds"]
                if by_isa:
                    row[key]["of_peak"] = rate / by_isa.get(row["side"].removeprefix("pyattn "), max(by_isa.values()))
    return rows


def module_rows(options: argparse.Namespace, sizes: tuple[int, ...], dtype: str) -> list[Row]:
    """The modules at one size and dtype."""
    batch, seqlen, width, heads = sizes
    to = {"dtype": DTYPES[dtype], "device": options.device}
    x = torch.randn(batch, seqlen, width, **to, requires_grad=True)

    def both(module: torch.nn.Module) -> Any:
        return torch.autograd.grad(module(x).sum(), (x, *module.parameters()))

    modules = {n: m.to(**to) for n, m in contenders.modules(width, heads, seqlen, options.flex).items()}
    forwards: dict[str, Call] = {n: partial(m, x.detach()) for n, m in modules.items()}
    trainings: dict[str, Call] = {n: partial(both, m) for n, m in modules.items()}
    what = f"module {batch}x{seqlen}x{width}, {heads} heads, {dtype}"
    return measure(what, forwards, trainings, 0.2 if options.quick else 2.0, options.device)


def show(rows: list[Row], device: str) -> None:
    """The rows of one comparison as a table."""
    rate = f"{'TFLOP/s':>9}" if device == "cuda" else f"{'peak':>6}"
    head = f"{'forward ms':>16}{'speed-up':>11}{rate}{'forward+backward ms':>21}{'speed-up':>11}{rate}{'MB':>6}"
    tqdm.write(f"\n{rows[0]['what']}\n{'':34}{head}")
    for row in rows:
        line = f"  {row['side']:32}"
        if "left_out" in row:
            tqdm.write(f"{line}  left out: {row['left_out'][:80]}")
            continue
        for key, width in (("forward", 10), ("forward_backward", 15)):
            t = row.get(key)
            if t is None:
                line += " " * (width + 17 + len(rate))
                continue
            spread = (t["high"] - t["low"]) / 2 / t["seconds"]
            cell = ""
            if "flops_per_second" in t:
                cell = f"{t['of_peak']:.0%}" if "of_peak" in t else f"{t['flops_per_second'] / 1e12:.1f}"
            line += f" {1e3 * t['seconds']:{width}.3f} ±{spread:3.0%}{t['speedup']:10.2f}x{cell:>{len(rate)}}"
        tqdm.write(line + ("" if row.get("peak_bytes") is None else f"{row['peak_bytes'] / 2**20:6.0f}"))


def measured_peaks(dtypes: Sequence[str], threads: int) -> Peaks:
    """Of every instruction set."""
    peaks = {}
    with contenders.settings_kept():
        for dtype in dtypes:
            for isa in _C.available_isas():
                _C.set_isa(isa)
                peaks[dtype, isa] = peak_flops(dtype, threads)
    return peaks


def write(folder: Path, options: argparse.Namespace, peaks: Peaks, rows: list[Row]) -> None:
    """results.json and speedups.png."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "machine": platform.machine(),
        "threads": options.threads,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "peak_flops": {f"{dtype} {isa}": peak for (dtype, isa), peak in peaks.items()},
        "results": rows,
    }
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    title = f"{hardware(options.device, options.threads)}, {record['date']}"
    draw_speedups(rows, title, folder / "speedups.png")
    print(f"\nwritten to {folder}: results.json, speedups.png")


def run(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options = parse(argv)
    if options.threads < 1:
        raise InputError("--threads must be at least 1", options.threads)
    check_device(options.device)
    defaults = (QUICK_SHAPES if options.quick else SHAPES)[options.device]
    shapes = [shape_of(text) for text in options.shapes or defaults]
    torch.set_num_threads(options.threads)
    peaks = measured_peaks(options.dtype, options.threads) if options.device == "cpu" else {}
    print(f"{hardware(options.device, options.threads)}, torch {torch.__version__}; speed-ups over torch's sdpa")
    if peaks:
        print("peak GFLOP/s  " + "  ".join(f"{dtype} {isa} {peak / 1e9:.0f}" for (dtype, isa), peak in peaks.items()))
    work: list[Callable[[], list[Row]]] = []
    for dtype in options.dtype:
        if options.only != "modules":
            work += [partial(function_rows, options, shape, dtype, peaks) for shape in shapes]
        if options.only != "functions":
            work += [
                partial(module_rows, options, sizes, dtype) for sizes in (MODULES[:1] if options.quick else MODULES)
            ]
    rows: list[Row] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what others compile
        for comparison in tqdm(work, unit="comparison", leave=False, disable=None):
            with contenders.settings_kept():
                new = comparison()
            show(new, options.device)
            rows += new
    if options.out:
        write(options.out, options, peaks, rows)
    return 0
