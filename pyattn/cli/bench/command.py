"""``pyattn bench``: time and memory of attention and of multi-head modules, beside PyTorch's.

All sides run in turn in one process. A time is the median of the rounds, ± half their interquartile range; a speed-up
is the median of the ratios within a round. "peak" is the share of the peak rate of multiply-adds, measured in the same
run with the same instruction set; the work is the causal half of the scores: forward 2 B H T (T + 1) D floating-point
operations, backward 2.5 times as many. "MB" is the rise of resident memory. "GB/s" is the size of the keys and values
of all tokens over the time.

If onnx and onnxruntime, or openvino, are installed, their attention takes part in the forward of the functions in
float32, with the same number of threads, and only if its results agree.

With --threads 1, times are CPU time, which other programs don't affect. With more, they are wall-clock time; if other
programs keep the cores busy, the table has ? in place of ±, and a sentence below it says so.

--against compares this installation with another build of pyattn, say of the commit before: pip install --target FOLDER
puts one in a folder. Each has a process, and they take turns; a speed-up is the median of the ratios within a round,
beside its quartiles, and "bits" says whether both gave the same result.

On a GPU, times are by its own clock, TFLOP/s replace the share of peak, and "MB" is the peak of torch's allocations.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]

import pyattn
from pyattn.cli import InputError, output
from pyattn.cli.bench import against
from pyattn.cli.bench.comparisons import AGAINST, KINDS, SECONDS, SHAPED, SHAPES, Comparison, comparisons, planned
from pyattn.cli.bench.sides import contenders
from pyattn.cli.bench.sides.calls import Peaks
from pyattn.cli.bench.table import Row, busy_note, paragraph, show, worst_wait
from pyattn.cli.contention import is_busy
from pyattn.cli.options import DTYPES, Command, check_fits, cpu, hardware
from pyattn.cli.timing import peak_flops

QUICK_SECONDS = 20.0
"""Half a minute, less ten seconds for importing torch and drawing on a slow machine."""
RESULTS = "results.json"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = Command("bench", __doc__)
    defaults = "; ".join(f"on {device} {' '.join(shapes)}" for device, shapes in SHAPES.items())
    parser.add_argument(
        "--shapes", nargs="+", metavar="BxHxTxD", help=f"shapes for functions and features; default: {defaults}"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        default=["float32", "bfloat16"],
        help="dtypes of all inputs; default: float32 bfloat16",
    )
    parser.place("where to measure")
    kinds = "; ".join(f"{name}: {kind.purpose}" for name, kind in KINDS.items())
    parser.add_argument("--only", choices=KINDS, help=f"measure only one kind: {kinds}; default: the first two")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, modules and rounds, in half a minute")
    parser.add_argument("--flex", action="store_true", help="compare FlexAttention too, compiled first")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FOLDER",
        help=f"compare with the pyattn installed in FOLDER, not with torch: {' and '.join(AGAINST)}, or --only",
    )
    parser.add_argument("--out", type=Path, help=f"folder for {RESULTS}, all times of all sides; default: none")
    parser.add_argument("--overwrite", action="store_true", help=f"replace an earlier run's {RESULTS} in --out")
    options = parser.checked(argv)
    if options.shapes and options.only not in (None, *SHAPED):
        raise InputError(f"--shapes must be left out with --only {options.only}", " ".join(options.shapes))
    if options.only == "distributed":
        check_ranks(options)
    if options.against:
        check_against(options)
    for text, dtype in itertools.product(options.shapes or (), options.dtype):
        check_fits(text, dtype, options.device)
    return options


def check_ranks(options: argparse.Namespace) -> None:
    """Raise InputError unless one process can be compared with several."""
    if not dist.is_available():
        raise InputError("--only distributed needs torch.distributed", f"torch {torch.__version__} without it")
    if options.device != "cpu":
        raise InputError("--device must be cpu with --only distributed", options.device)
    if options.threads < 2:
        raise InputError("--threads, the number of ranks, must be at least 2 with --only distributed", options.threads)


def check_against(options: argparse.Namespace) -> None:
    """Raise InputError unless two builds can be compared."""
    if options.device != "cpu":
        raise InputError("--device must be cpu with --against", options.device)
    if options.only == "distributed":
        raise InputError("--only must be a kind of one process with --against", options.only)
    if not (options.against / "pyattn").is_dir():
        raise InputError("--against must be a folder with an installed pyattn", options.against)


def measured_peaks(dtypes: Sequence[str], threads: int) -> Peaks:
    """The measured peak of every instruction set in every dtype."""
    peaks = {}
    with contenders.settings_kept():
        for dtype in dtypes:
            for isa in pyattn.isas():
                pyattn.set_isa(isa)
                peaks[dtype, isa] = peak_flops(dtype, threads)
    return peaks


def show_peaks(peaks: Peaks) -> None:
    """Print the peaks, a dtype in each line and an instruction set in each column; nothing if there are none."""
    names = list(dict.fromkeys(isa for _, isa in peaks))
    for i, dtype in enumerate(dict.fromkeys(dtype for dtype, _ in peaks)):
        if not i:
            print(f"{'peak GFLOP/s':14}" + "".join(f"{name:>13}" for name in names))
        print(f"  {dtype:12}" + "".join(f"{peaks[dtype, name] / 1e9:13.0f}" for name in names))


def introduce(options: argparse.Namespace, peaks: Peaks) -> None:
    """Print the hardware, its peaks, and what --quick omits."""
    clock = "; CPU time" if options.device == "cpu" and options.threads == 1 else ""
    where = f"{hardware(options.device, options.threads)}, torch {torch.__version__}{clock}"
    base = KINDS[options.only or "functions"].base
    print(f"{where}; speed-ups over {base}")
    show_peaks(peaks)
    if options.quick:
        every = comparisons(argparse.Namespace(**vars(options) | {"quick": False}), peaks)
        print(f"--quick makes {len(comparisons(options, peaks))} of {len(every)} comparisons, in fewer rounds")


def measured(todo: dict[str, Comparison], ends: float) -> list[Row]:
    """The rows of all comparisons, each shown when it is done; they share the time until ``ends`` equally."""
    rows: list[Row] = []
    late: list[str] = []
    for i, (what, comparison) in enumerate(tqdm(todo.items(), unit="comparison", leave=False, disable=None)):
        now = time.perf_counter()
        if now >= ends:
            late.append(what)
            continue
        with contenders.settings_kept():
            new = comparison(now + (ends - now) / (len(todo) - i))
        show(new)
        rows += new
    if late:
        print("\n" + paragraph(f"no time left for {'; '.join(late)}", later="  "))
    if is_busy(wait := worst_wait(rows)):
        print("\n" + busy_note(wait))
    return rows


def write(folder: Path, options: argparse.Namespace, peaks: Peaks, rows: list[Row]) -> None:
    """Write the record."""
    record = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu(),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "against": str(options.against) if options.against else None,
        "peak_flops": {f"{dtype} {isa}": peak for (dtype, isa), peak in peaks.items()},
        "results": rows,
    }
    output.write(folder / RESULTS, (json.dumps(record, indent=1) + "\n").encode())
    print(f"\nwritten to {folder / RESULTS}")


def measure(options: argparse.Namespace) -> tuple[Peaks, list[Row]]:
    """Measure and show everything that the options name: the peaks, none with --against, and the rows."""
    ends = time.perf_counter() + (QUICK_SECONDS if options.quick else math.inf)
    torch.set_num_threads(options.threads)
    if options.against:
        plans = planned(options, {}, [options.only] if options.only else AGAINST)
        todo = {what: against.Plan(kind.calls, run, sizes) for what, (kind, run, sizes) in plans.items()}
        print(f"{hardware(options.device, options.threads)}; speed-ups over {options.against}")
        return {}, against.measured(options.against, todo, SECONDS, ends, options.threads)
    peaks = measured_peaks(options.dtype, options.threads) if options.device == "cpu" else {}
    introduce(options, peaks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' compilers warn
        return peaks, measured(comparisons(options, peaks), ends)


def run(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options = parse(argv)
    if not options.out:
        measure(options)
        return 0
    with output.held("--out", options.out, (RESULTS,), options.overwrite):
        write(options.out, options, *measure(options))
    return 0
