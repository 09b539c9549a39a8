"""The code that ranks run for test_wrong_arguments.py: calls in which some ranks change one argument."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks.ranks import mesh_of
from torch import Tensor

from pyattn import KVCache, distributed

Arguments = dict[str, Any]
OTHER_DTYPES = {torch.float32: (torch.float64, torch.bfloat16, torch.int64), torch.bool: (torch.uint8, torch.float32)}
OTHER_DTYPES[torch.int64] = torch.int32, torch.float64, torch.bool
WRONG: Mapping[str, tuple[Any, ...]] = {
    "causal": (False, None, 1, "yes"),
    "q_offset": (3, None, 2**63, 1.5, math.nan),
    "window": (None, (3, 1), (-2, 0), (1.0, 2.0), (1,), 7, (2**63, 0)),
    "softmax_scale": (None, 0.25, math.nan, math.inf, "1", 1e-300, 10**400),
    "softcap": (None, 3.0, -1.0, math.nan, "2"),
    "dropout_p": (None, 0.5, 1.0, -0.1, math.nan, "0.5"),
    "dropout_seed": (None, 4, 2**63, 1.5, "seed"),
    "return_lse": (False,),
    "return_max_score": (False,),
    "layout": ("chunk", "zig", None, 3),
    "dim": (1, 7, -5, 2.0, None),
    "cache": (None, "cache"),
}
"""Other values of options that are no tensors, right and wrong ones."""


OPTIONS: Arguments = {"causal": True, "window": (9, 2), "softmax_scale": 0.5, "softcap": 2.0, "dropout_p": 0.3}
OPTIONS |= {"return_lse": True, "return_max_score": True}


ALWAYS = {"key_ranges size 0: 1", "key_ranges size 1: 1", "mask size 0: 3", "bias size 1: 5", "q_offset meta"}


class Case(NamedTuple):
    """A change of a call: whether that is one with all options, its name, and the arguments that some ranks change."""

    full: bool
    label: str
    changes: Arguments


def wrong_tensors(t: Tensor) -> dict[str, Any]:
    """Values that differ from a tensor in one property, by what they are."""
    found = {str(dtype): t.to(dtype) for dtype in OTHER_DTYPES[t.dtype]}
    found |= {"missing": None, "list": t.tolist(), "text": "tensor", "meta": t.to("meta"), "sparse": t.to_sparse()}
    found["a dimension more"] = t[None]
    if t.dim():
        found["nested"] = torch.nested.nested_tensor([t, t])
        found |= {"a dimension fewer": t.select(0, 0), "no dimension": t.flatten()[0]}
    for dim, size in enumerate(t.shape):
        found |= {f"size {dim}: {n}": t.narrow(dim, 0, n) for n in {0, 1, size - 1} - {size}}
        found[f"size {dim}: {size + 1}"] = torch.cat([t, t.narrow(dim, size - 1, 1)], dim)
    if t.is_floating_point():
        found["requires_grad"] = t.clone().requires_grad_()
    return found


def cases(valid: Arguments, given: Arguments) -> Iterator[Case]:
    """All changes of a call: of one argument, of q, k and v alike, and an option that is given alone."""
    for name, value in (valid | given).items():
        others = dict(wrong_tensors(value)) if isinstance(value, Tensor) else {}
        others |= {repr(other)[:12]: other for other in WRONG.get(name, ())}
        for kind, other in others.items():
            yield Case(name not in valid, f"{name} {kind}", {name: other})
    if "k" in valid:
        by_name = {name: wrong_tensors(valid[name]) for name in "qkv"}
        for kind in [kind for kind in by_name["q"] if kind in by_name["k"]]:
            yield Case(False, f"qkv {kind}", {name: by_name[name][kind] for name in "qkv"})
    for name, value in given.items():
        yield Case(False, f"{name} alone", {name: value})


def call_of(group: dist.ProcessGroup, name: str) -> tuple[Callable[..., Any], Arguments, Arguments]:
    """A function, its arguments without a default, and others; calls with and without these are right."""
    generator = torch.Generator().manual_seed(0)
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def ranges(rows: int, first: int, last: int) -> Tensor:
        return torch.tensor([[0, first], [first + 1, last]]).repeat(2, rows, 1, 1)

    mesh = mesh_of("mesh 2x4") if name == "usp_attention" else None
    shard = partial(distributed.shard, group=mesh or group)
    function = partial(getattr(distributed, name), **{"mesh": mesh} if mesh else {"group": group})
    if name == "unshard":
        return function, {"tensor": some(2, 3, 4), "dim": 1}, {"layout": "zigzag"}
    options = OPTIONS | {
        "q_offset": torch.tensor([1, 2]),
        "alibi_slopes": some(4).abs(),
        "sinks": some(4),
        "relative_bias": some(4, 5),
        "dropout_seed": torch.tensor(3),
    }
    if name == "attention_with_cache":
        cache, rows = KVCache(2, 2, 6, 8), 3
        cache.append(*(some(2, 2, 5, 8) + rank for _ in range(2)))
        options |= {
            "key_ranges": ranges(rows, 5, 5 * size),
            "mask": some(2, 4, rows, 6) < 1,
            "bias": some(2, 4, rows, 6),
        }
        return function, {"q": some(2, 4, rows, 8), "cache": cache}, options
    rows, columns = 4 * size, 6 * size
    options["layout"] = "zigzag"
    heads, lengths = {"q": 4, "k": 2, "v": 2}, {"q": rows, "k": columns, "v": columns}
    if name == "ring_attention_varlen":
        begins = {"cu_seqlens_q": torch.tensor([0, 3, rows]), "cu_seqlens_k": torch.tensor([0, 3, columns])}
        parts = {t: shard(some(lengths[t], heads[t], 8), 0) for t in "qkv"}
        return function, parts | begins, options | {"key_ranges": shard(ranges(rows, 1, 3)[0], 0)}
    pairs = 2, 4, rows, columns
    options |= {"key_ranges": shard(ranges(rows, 5, columns), 1), "mask": shard(some(*pairs) < 1, 2)}
    return (
        function,
        {t: shard(some(2, heads[t], lengths[t], 8), 2) for t in "qkv"},
        options | {"bias": shard(some(*pairs), 2)},
    )


class Outcome(NamedTuple):
    """A rank's error, "" if there was none, the number of messages before it, and what was wrong with the next call."""

    label: str
    error: str
    messages: int
    fault: str


def outcomes(group: dist.ProcessGroup, name: str, every: bool, begin: int, step: int) -> list[Outcome]:
    """Each ``step``th case, ``begin`` among them, and those of ALWAYS; every rank or the last alone changes arguments.

    After each comes a right call, whose results must be those of the first one to the bit.
    """
    function, valid, given = call_of(group, name)
    expected, found = function(**valid | given), list[Outcome]()
    changed = every or dist.get_rank(group) == dist.get_world_size(group) - 1
    chosen = [*cases(valid, given)]
    chosen = [case for at, case in enumerate(chosen) if (at - begin) % step == 0 or case.label in ALWAYS]
    for case in chosen:
        right = valid | (given if case.full else {})
        error, messages = error_and_messages(function, right | (case.changes if changed else {}))
        fault = ""
        try:
            torch.testing.assert_close(function(**valid | given), expected, rtol=0, atol=0)
        except Exception as problem:
            fault = f"{type(problem).__name__}: {problem}"
        found.append(Outcome(case.label, error, messages, fault))
    return found


def compiled_errors(group: dist.ProcessGroup, name: str, changes: Arguments) -> list[str]:
    """The error of a compiled call whose argument the last rank changes, and that of the next call, "" if none."""
    function, valid, _ = call_of(group, name)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    torch.compiler.reset()
    graph = torch.compile(lambda arguments: function(**arguments), fullgraph=True, backend="aot_eager")
    wrong = valid | (changes if last else {})
    return [error_and_messages(call, {})[0] for call in (partial(graph, wrong), partial(function, **valid))]


def error_and_messages(function: Callable[..., Any], arguments: Arguments) -> tuple[str, int]:
    """The error of a call, "" if there is none, and how many messages with numbers it sent."""
    error, counts = "", list[str]()

    def counted(kind: str) -> Any:
        send = getattr(dist, kind)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts.append(kind)
            return send(*args, **kwargs)

        return mock.patch.object(dist, kind, counting)

    with counted("isend"), counted("all_to_all_single"):
        try:
            function(**arguments)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
    return error, len(counts)
