"""``pyattn profile``: where native attention spends its time.

The tables show the phases inside the kernels (packing, each product, softmax, dropout, storing): milliseconds per call,
summed over threads, the products' floating-point operations per second and thread, and their share of the peak of
multiply-adds measured in the same run. Operations are counted as computed; tiles that the mask cuts compute more than
needed, so the last line of a pass counts only what the mask leaves. torch.profiler's table of the same calls follows.
--trace writes both to one file for chrome://tracing or https://ui.perfetto.dev; the phases of a task alternate
thousands of times a second, so the trace joins each phase of a task into one bar.

--queries 1 is decoding. Below its tables is the rate at which all threads together read the keys and values that the
mask leaves, beside torch.sum, which reads all of them.

On a GPU the tables show the kernels of each pass as torch.profiler sees them: milliseconds and launches per call, and
the operations per second of the pass, counting only what the mask leaves. --trace writes torch's trace.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from pyattn import _C, attention, isa, isas, masks, set_isa
from pyattn.cli import InputError, output
from pyattn.cli.checks import check_integer, check_share
from pyattn.cli.contention import Contention, busy, is_busy
from pyattn.cli.options import DTYPES, Command, check_fits, hardware, shape_of
from pyattn.cli.profile import report
from pyattn.cli.timing import once, peak_flops
from pyattn.nn.rotary import alibi_slopes

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
    options = parser.parse_args(argv)
    check(options)
    parser.check(options)
    for text in options.shapes:
        check_fits(text, options.dtype, options.device, options.queries, options.num_heads_kv)
    return options


def features(shape: Sequence[int], options: argparse.Namespace, **tensor: Any) -> dict[str, Any]:
    """The masks and scores asked for, as :func:`pyattn.attention` takes them; ``tensor`` goes to constructors."""
    _, heads, length, _ = shape
    queries = options.queries or length
    found: dict[str, Any] = {"causal": not options.full, "window": tuple(options.window), "softcap": options.softcap}
    if options.documents:
        found["key_ranges"] = masks.chunked(length, options.documents)[:, -queries:].to(options.device)
    if options.mask:
        found["mask"] = torch.rand(1, 1, queries, length, device=options.device) > 0.25
    if options.bias:
        found["bias"] = torch.randn(1, 1, queries, length, **tensor)
    if options.alibi:
        found["alibi_slopes"] = alibi_slopes(heads, device=options.device).requires_grad_(tensor["requires_grad"])
    if options.sinks:
        found["sinks"] = torch.zeros(heads, **tensor)
    return found


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


def measure(shape: tuple[int, ...], options: argparse.Namespace) -> None:
    """Profile one shape, print its tables, and write its trace if requested."""
    batch, heads, length, head_dim = shape
    backward = not (options.forward or options.queries)
    tensor = {"dtype": DTYPES[options.dtype], "device": options.device, "requires_grad": backward}
    q = torch.randn(batch, heads, options.queries or length, head_dim, **tensor)
    k, v = (torch.randn(batch, options.num_heads_kv or heads, length, head_dim, **tensor) for _ in range(2))
    dout = torch.randn_like(q)
    extras = features(shape, options, **tensor)
    leaves = [t for t in (q, k, v, *extras.values()) if isinstance(t, torch.Tensor) and t.requires_grad]

    def call() -> None:
        out = attention(q, k, v, dropout_p=options.dropout, **extras)
        if backward:
            torch.autograd.grad(out, leaves, dout)

    with FlopCounterMode(display=False) as counter:
        call()  # also a warm-up
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    useful = {name.removeprefix(OPERATOR): flops for name, flops in counts.items() if name.startswith(OPERATOR)}
    calls = min(1000, max(3, int(SECONDS / once(call, 1, options.device))))
    contention = Contention(options.threads)
    tasks, theirs = profiled(call, calls)
    waited = contention.share()
    events = theirs.events() or ()
    print(f"{'x'.join(map(str, shape))} {options.dtype}, {calls} calls")
    if options.device == "cpu":
        peak = peak_flops(options.dtype, options.threads) / options.threads
        print(f"peak {peak / 1e9:.0f} GFLOP/s a thread")
        if is_busy(waited):
            print(busy(waited))
        report.show(tasks, calls, useful, peak)
    else:
        report.show_kernels(events, useful)
    if options.queries:
        report.show_reading(call, q, k, v, **extras)
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
    if not 0 <= options.softcap < math.inf:
        raise InputError("--softcap must be finite and at least 0", options.softcap)
    if options.isa and options.device != "cpu":
        raise InputError(f"--isa must be left out with --device {options.device}", options.isa)
    if options.trace and len(options.shapes) > 1:
        raise InputError("--trace takes one of --shapes", " ".join(options.shapes))
    for _, heads, length, _ in map(shape_of, options.shapes):
        if options.queries is not None and not 1 <= options.queries <= length:
            raise InputError(f"--queries must lie between 1 and T = {length}", options.queries)
        if options.num_heads_kv is not None and (options.num_heads_kv < 1 or heads % options.num_heads_kv):
            raise InputError(f"--num-heads-kv must divide H = {heads}", options.num_heads_kv)
    if options.trace:
        output.check_file("--trace", options.trace)


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
