"""Promise: out alone does not pass for (out, softmax_lse), which FlashAttention 3 returned before July 2025."""

import pytest
import torch
from support.assertions import refused
from torch.testing import assert_close

from pyattn.adapters.flash_attn import alias
from pyattn.adapters.flash_attn.hopper import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

X = torch.randn(1, 5, 2, 8)
QKV = torch.stack([X, X, X], 2)
ENDS = torch.tensor([0, 5], dtype=torch.int32)
CALLS = {
    "flash_attn_func(X, X, X)": flash_attn_func,
    "flash_attn_varlen_func(X[0], X[0], X[0], ENDS, ENDS, 5, 5)": flash_attn_varlen_func,
    "flash_attn_qkvpacked_func(QKV, causal=True)": flash_attn_qkvpacked_func,
}
TAKEN = {
    "out = {}[0]": "takes element 0 of",
    "out = {}[0].sum()": "takes element 0 of",
    "x = {}\nout = x[0]": "takes element 0 of",
    "def f():\n    x = {}\n    x = x[0]\n    return x\nf()": "takes element 0 of",
    "def f():\n    return {}[0]\nf()": "takes element 0 of",
    "out, lse = {}": "unpacks",
    "out, *rest = {}": "unpacks",
    "def f():\n    out, lse, *_ = {}\n    return out\nf()": "unpacks",
}
FINE = [
    "out = {}",
    "x = {}\nout = x[0] if isinstance(x, tuple) else x",
    "out = {}[0:1]",
    "out = {}[..., 0]",
    "out = {}.sum()",
    "x = {}\ny = [1]\nout = y[0]",
    "def f():\n    return {}\nout = f()",
    "result = [{}]",
    "out = {}[-1]",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("statement", TAKEN)
def test_code_for_older_versions(call, statement):
    """Also where shapes let it pass: there is one sequence. With both returned it runs."""
    names = {"X": X, "QKV": QKV, "ENDS": ENDS}
    code = compile(statement.format(call), "old.py", "exec")
    name = CALLS[call].__name__
    with refused(
        TypeError,
        f"{name} returns out alone, as FlashAttention 3 does since July 2025, but its caller {TAKEN[statement]} it",
    ):
        exec(code, names | {name: CALLS[call]})
    with alias(fa3_returns_lse=True):
        import flash_attn_interface

        after = names | {name: getattr(flash_attn_interface, name)}
        exec(code, after)
    out = CALLS[call](**{}, **_arguments(call))
    if "sum()" not in statement and "out" in after:
        assert_close(after["out"], out)


def _arguments(call):
    return (
        {"qkv": QKV, "causal": True}
        if "qkv" in call
        else {"q": X, "k": X, "v": X}
        if "varlen" not in call
        else {
            "q": X[0],
            "k": X[0],
            "v": X[0],
            "cu_seqlens_q": ENDS,
            "cu_seqlens_k": ENDS,
            "max_seqlen_q": 5,
            "max_seqlen_k": 5,
        }
    )


@pytest.mark.parametrize("statement", FINE)
def test_code_that_runs(statement):
    exec(
        compile(statement.format("flash_attn_func(X, X, X)"), "new.py", "exec"),
        {"X": X, "flash_attn_func": flash_attn_func},
    )


def test_both_where_the_call_asks_for_them():
    out, lse = flash_attn_func(X, X, X, return_attn_probs=True)
    assert_close(flash_attn_func(X, X, X, return_attn_probs=True)[0], out)
    assert lse.shape == (1, 2, 5)


def test_compiled_code():
    """The bytecode of the caller is not that of the graph: nothing is looked at, and the graph is one."""
    compiled = torch.compile(lambda x: flash_attn_func(x, x, x, causal=True) * 2, fullgraph=True, backend="aot_eager")
    assert_close(compiled(X), flash_attn_func(X, X, X, causal=True) * 2)
