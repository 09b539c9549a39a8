"""Causal attention and multi-head modules: ``pyattn bench`` without ``--only``, side by side."""

from pyattn.cli.bench.sides import contenders, runtimes
from pyattn.cli.bench.sides.calls import LARGEST_SCORES, Calls, Run, Side, Sizes, both


def of_functions(run: Run, shape: Sizes) -> Calls:
    """The functions on q, k, v of ``shape`` (B, H, T, D)."""
    batch, heads, seqlen, head_dim = shape
    *qkv, dout = (run.random(*shape) for _ in range(4))
    functions = contenders.functions(run.device, run.flex)
    if batch * heads * seqlen**2 * dout.itemsize > LARGEST_SCORES:
        del functions["plain torch"]
    sides = {name: Side(function, qkv, dout.detach()) for name, function in functions.items()}
    others = runtimes.forwards(*(t.detach() for t in qkv))
    return both(sides, 2 * batch * heads * seqlen * (seqlen + 1) * head_dim, others)


def of_modules(run: Run, sizes: Sizes) -> Calls:
    """The modules at ``sizes``: batch, seqlen, width, heads."""
    batch, seqlen, width, heads = sizes
    x, dout = (run.random(batch, seqlen, width) for _ in range(2))
    modules = contenders.modules(width, heads, seqlen, run.flex)
    return both({n: Side(m.to(device=run.device, dtype=x.dtype), [x], dout.detach()) for n, m in modules.items()})
