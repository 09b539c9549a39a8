"""``pyattn profile``: where native attention spends its time.

The tables show the phases inside the kernels (packing, each product, softmax, dropout, storing): milliseconds per call,
summed over threads, the products' floating-point operations per second and thread, and their share of the peak of
multiply-adds measured in the same run. Operations are counted as computed; tiles that the mask cuts compute more than
needed, so the last line of a pass counts only what the mask leaves. torch.profiler's table of the same calls follows.
--trace writes both to one file for chrome://tracing or https://ui.perfetto.dev; the phases of a task alternate
thousands of times a second, so the trace joins each phase of a task into one bar.

On a CPU, hardware counters of the calls follow where the system allows them, and the parts of a small call's fixed
cost. --roofline draws the products of each pass under the machine's peak and bandwidth, and prints every phase beside
its bound; bytes are those of the tensors that a phase reads or writes, once a call.

--queries 1 is decoding. Below its tables is the rate at which all threads together read the keys and values that the
mask leaves, beside torch.sum, which reads all of them.

On a GPU the tables show the kernels of each pass as torch.profiler sees them: milliseconds and launches per call, and
the operations per second of the pass, counting only what the mask leaves. --trace writes torch's trace.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from pyattn import _C, isa, isas, set_isa
from pyattn.cli import InputError, output
from pyattn.cli.checks import check_integer, check_share
from pyattn.cli.contention import Contention, busy, is_busy
from pyattn.cli.options import DTYPES, Command, check_fits, hardware, shape_of
from pyattn.cli.profile import call_cost, counters, report, roofline
from pyattn.cli.profile.phases import pass_times
from pyattn.cli.profile.subject import Subject, small
from pyattn.cli.timing import once, peak_flops

SECONDS = 0.5
"""Time to spend on repeated calls; there are at least three."""


OPERATOR = "pyattn.attention_"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = Command("profile", __doc__)
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="BxHxTxD",
        default=["1x8x1024x64"],
        help="shapes of q, k and v; default: 1x8x1024x64",
    )
    parser.add_argument("--num-heads-kv", type=int, metavar="N", help="number of heads of k and v; default: H")
    parser.add_argument(
        "--queries",
        type=int,
        metavar="N",
        help="the last N of the T queries, forward only, as over a KV cache; default: T",
    )
    parser.option("dtype", "float32", "dtype of all inputs", choices=DTYPES)
    parser.place("where to measure")
    parser.add_argument("--isa", choices=isas(), help="instruction set; default: the active one")
    parser.option("dropout", 0.0, "dropout probability", check_share, metavar="P")
    parser.window()
    parser.add_argument("--documents", type=int, metavar="N", help="documents packed into T, of N tokens; default: one")
    parser.add_argument("--selected", type=int, metavar="N", help="entries of each query's list; default: no lists")
    parser.option("selected-block", 1, "keys of an entry of --selected", metavar="N")
    parser.option("softcap", 0.0, "bound on the scores, 0: none", metavar="C")
    for name, meaning in {
        "full": "leave out the causal mask",
        "mask": "bool mask (1, 1, T, T) that hides one key of four",
        "bias": "bias (1, 1, T, T) added to the scores",
        "alibi": "ALiBi with the paper's slopes",
        "sinks": "one sink per head",
        "forward": "leave out the backward",
    }.items():
        parser.add_argument(f"--{name}", action="store_true", help=meaning)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="Chrome trace to write, compressed if named *.gz; default: none"
    )
    parser.add_argument("--roofline", type=Path, metavar="FILE", help="PNG of the roofline to write; default: none")
    options = parser.parse_args(argv)
    check(options)
    parser.check(options)
    for text in options.shapes:
        check_fits(text, options.dtype, options.device, options.queries, options.num_heads_kv)
    return options


def profiled(call: Callable[[], object], calls: int) -> tuple[list[_C.TaskProfile], torch.profiler.profile]:
    """The tasks of the CPU kernels over ``calls`` calls, and torch's profile of the same calls."""
    with torch.profiler.profile(record_shapes=True, with_flops=True, acc_events=True) as theirs:
        _C.start_profile()
        try:
            for _ in range(calls):
                call()
        finally:
            tasks = _C.stop_profile()
    return tasks, theirs


def selected_path(tasks: Sequence[_C.TaskProfile], lists: int) -> str:
    """How forward reads the lists of selected keys, given how many all KV heads have in the profiled calls."""
    if any(task.pass_name == "merge_out" for task in tasks):
        return "selected keys are read in ranges of 1,024, whose results are merged"
    if sum(task.items for task in tasks if task.pass_name == "forward") < lists:  # an item has many queries
        return "selected keys are read in segments or blocks of all keys, each by many queries"
    return "selected keys are read query by query; the query heads of a KV head share them"


def show_cpu(
    shape: tuple[int, ...],
    subject: Subject,
    options: argparse.Namespace,
    tasks: list[_C.TaskProfile],
    calls: int,
    peak: float,
) -> None:
    """Print what follows the phases on a CPU: the roofline if wanted, counters, the parts of a small call.

    Args:
        tasks: all tasks of the ``calls`` calls.
        peak: operations per second of one thread.
    """
    if options.roofline:
        limits = roofline.machine(peak, options.threads)
        found = roofline.points(pass_times(tasks, calls), subject.tensors)
        roofline.show(found, limits)
        from pyattn.cli.profile import roofline_chart  # needs matplotlib

        title = f"{'x'.join(map(str, shape))} {options.dtype}, {hardware('cpu', options.threads)}, {isa()}"
        roofline_chart.draw(found, limits, title, options.roofline)
        print(f"written to {options.roofline}")
    counts = {name: counters.counted(call, calls) for name, call in subject.calls().items()}
    counters.show({name: count for name, (count, _) in counts.items()}, counts["forward"][1])
    least, little = small(shape, options)
    parts = {name: call_cost.split(call, SECONDS / 4) for name, call in little.calls().items()}
    call_cost.show("x".join(map(str, least)), parts)


def measure(shape: tuple[int, ...], options: argparse.Namespace) -> None:
    """Profile one shape, print its tables, and write its trace and roofline if requested."""
    subject = Subject(shape, options)
    with FlopCounterMode(display=False) as counter:
        subject.call()  # also a warm-up
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    useful = {name.removeprefix(OPERATOR): flops for name, flops in counts.items() if name.startswith(OPERATOR)}
    calls = min(1000, max(3, int(SECONDS / once(subject.call, 1, options.device))))
    contention = Contention(options.threads)
    tasks, theirs = profiled(subject.call, calls)
    waited = contention.share()
    events = theirs.events() or ()
    print(f"{'x'.join(map(str, shape))} {options.dtype}, {calls} calls")
    if options.device == "cpu":
        peak = peak_flops(options.dtype, options.threads) / options.threads
        print(f"peak {peak / 1e9:.0f} GFLOP/s a thread")
        if options.selected:
            batch, heads, length, _ = shape
            lists = batch * (options.num_heads_kv or heads) * (options.queries or length)
            print(selected_path(tasks, lists * calls))
        if is_busy(waited):
            print(busy(waited))
        report.show(tasks, calls, useful, peak)
        show_cpu(shape, subject, options, tasks, calls, peak)
    else:
        report.show_kernels(events, useful)
    if options.queries:
        q, k, v = (subject.tensors[name] for name in "qkv")
        report.show_reading(subject.call, q, k, v, **subject.extras)
    for event in events:  # torch counts only its own operators
        event.flops = useful.get(event.name.removeprefix("pyattn::attention_"), event.flops)
    print("\ntorch.profiler:")
    order = f"self_{'cpu' if options.device == 'cpu' else 'device'}_time_total"
    print(theirs.key_averages().table(sort_by=order, row_limit=8, max_name_column_width=40))
    if options.trace:
        report.write_trace(options.trace, tasks, theirs)
        print(f"written to {options.trace}: for chrome://tracing or https://ui.perfetto.dev")


def check(options: argparse.Namespace) -> None:
    """Raise InputError for options that don't go together, and for those without a default."""
    if options.documents is not None:
        check_integer("--documents", options.documents, 1)
    if options.selected is not None:
        check_integer("--selected", options.selected, 1)
        check_integer("--selected-block", options.selected_block, 1)
        if options.device != "cpu":
            raise InputError("--device must be cpu with --selected", options.device)
    if not 0 <= options.softcap < math.inf:
        raise InputError("--softcap must be finite and at least 0", options.softcap)
    if options.isa and options.device != "cpu":
        raise InputError(f"--isa must be left out with --device {options.device}", options.isa)
    for name in ("trace", "roofline"):
        if getattr(options, name) and len(options.shapes) > 1:
            raise InputError(f"--{name} takes one of --shapes", " ".join(options.shapes))
    if options.roofline and options.device != "cpu":
        raise InputError("--device must be cpu with --roofline", options.device)
    for _, heads, length, _ in map(shape_of, options.shapes):
        if options.queries is not None and not 1 <= options.queries <= length:
            raise InputError(f"--queries must lie between 1 and T = {length}", options.queries)
        if options.num_heads_kv is not None and (options.num_heads_kv < 1 or heads % options.num_heads_kv):
            raise InputError(f"--num-heads-kv must divide H = {heads}", options.num_heads_kv)
    for name in ("trace", "roofline"):
        if path := getattr(options, name):
            output.check_file(f"--{name}", path)
    if options.roofline:
        from pyattn.cli.profile import roofline_chart  # noqa: F401  (fails here, before the work, without matplotlib)


def run(argv: Sequence[str]) -> int:
    """Measure, show, write."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    set_isa(options.isa or isa())
    where = hardware(options.device, options.threads) + (f", {isa()}" if options.device == "cpu" else "")
    print(" ".join([f"{where}, torch {torch.__version__}", *argv]))
    for i, shape in enumerate(map(shape_of, options.shapes)):
        print(end="\n" if i else "")
        measure(shape, options)
    return 0
