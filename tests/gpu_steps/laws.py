"""What holds to the bit, and what is refused: unseen values, rows without keys, the dropout mask, repeats, errors."""

import itertools
import math
from functools import partial
from typing import Any

import torch
from gpu_steps.child import Check
from gpu_steps.common import assert_same, determinism, options_on, tensors
from helpers import DTYPES, Case, assert_equal, run
from torch import Tensor
from torch.autograd import gradcheck

from pyattn import attention, dropout_mask
from pyattn.dropout import draw_seed

LENGTHS = (1, 17, 64, 100, 230, 300)
HEAD_DIMS = ((24, 20), (64, 64), (128, 128), (256, 192))
SEEDS = (0, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF)
REPEATS = 20


def unseen_changes_nothing(dtype: torch.dtype, device: str, head_dim: int, head_dim_v: int) -> None:
    """Keys and values after position t for the rows up to it, queries and dout before t for the keys from it on."""
    for seqlen, bad, deterministic in itertools.product(LENGTHS, (math.nan, math.inf, 7.0), (True, False)):
        (q, k, v), dout, _ = tensors(Case(1, 2, 1, seqlen, seqlen, head_dim, head_dim_v), dtype, device)
        t = seqlen // 2
        future, past_q, past_dout = [k.clone(), v.clone()], q.clone(), dout.clone()
        for x in future:
            x[:, :, t + 1 :] = bad
        past_q[:, :, :t], past_dout[:, :, :t] = bad, bad
        with determinism(deterministic):
            clean = run(attention, (q, k, v), dout)
            of_rows = run(attention, (q, *future), dout)[:3]
            of_keys = [
                run(attention, (queries, k, v), gradient)[3:]
                for queries, gradient in ((past_q, dout), (q, past_dout), (past_q, past_dout))
            ]
        assert_same(tuple(x[:, :, : t + 1] for x in of_rows), tuple(x[:, :, : t + 1] for x in clean), deterministic)
        for results in of_keys:
            assert_equal(tuple(x[:, :, t:] for x in results), tuple(x[:, :, t:] for x in clean[3:]))


def nan_that_is_seen_arrives(dtype: torch.dtype, device: str) -> None:
    for seqlen, causal, which in itertools.product(LENGTHS, (True, False), range(3)):
        inputs, _, _ = tensors(Case(1, 2, 2, seqlen, seqlen, 24, 20), dtype, device)
        t = seqlen // 2
        inputs[which][0, 0, t, 3] = math.nan
        out, lse = attention(*inputs, causal=causal, return_lse=True)
        rows = slice(t, t + 1) if which == 0 else slice(t, None) if causal else slice(None)
        columns = slice(3, 4) if which == 2 else slice(None)
        expected = torch.zeros_like(out, dtype=torch.bool)
        expected[0, 0, rows, columns] = True
        assert torch.equal(out.isnan(), expected)
        assert torch.equal(lse.isnan(), expected.any(-1) & (which < 2))


def rows_that_see_nothing(dtype: torch.dtype, device: str) -> None:
    case = Case(1, 4, 2, 280, 150, 64, 64, q_offset=-170)
    inputs = tensors(case, dtype, device)
    for deterministic in (True, False):
        with determinism(deterministic):
            out, lse, dq, dk, dv = run(attention, *inputs, **case.options)
        assert (out[:, :, :170] == 0).all()
        assert (lse[:, :, :170] == -math.inf).all()
        assert (dq[:, :, :170] == 0).all()
        assert lse[:, :, 170:].isfinite().all()
        assert (dk[:, :, 110:] == 0).all()
        assert (dv[:, :, 110:] == 0).all()


def every_element_is_written(dtype: torch.dtype, device: str) -> None:
    """Where torch.empty is filled with NaN."""
    case = Case(2, 3, 3, 170, 145, 72, 40, q_offset=-66)
    inputs = tensors(case, dtype, device)
    for deterministic in (True, False):
        torch.use_deterministic_algorithms(True)
        try:
            with determinism(deterministic):
                results = run(attention, *inputs, **case.options)
        finally:
            torch.use_deterministic_algorithms(False)
        for x in results:
            assert not x.isnan().any()


def dropout_is_that_of_the_cpu(dtype: torch.dtype, device: str) -> None:
    """With equal scores and values 1 at one key, out is that key's weight; dv that of the query."""
    b, h, g, sq, sk, p = 2, 2, 2, 67, 203, 0.4
    q, k = (torch.zeros(b, heads, seqlen, 8, dtype=dtype, device=device) for heads, seqlen in ((h * g, sq), (h, sk)))
    v = torch.eye(sk, dtype=dtype, device=device).expand(b, h, sk, sk).clone().requires_grad_()
    for seed in SEEDS:
        out = attention(q, k, v, causal=False, dropout_p=p, dropout_seed=seed)
        kept = dropout_mask(seed, b, h * g, sq, sk, p).to(device)
        assert torch.equal(out != 0, kept)
        assert out[kept].unique().numel() == 1
        for head in range(g):
            dout = torch.zeros_like(out)
            dout[:, head::g] = torch.eye(sq, sk, dtype=dtype, device=device)
            (dv,) = torch.autograd.grad(out, v, dout, retain_graph=True)
            assert torch.equal(dv[..., :sq] != 0, kept[:, head::g].mT)


def the_generator_gives_seeds(device: str) -> None:
    (q, k, v), _, _ = tensors(Case(1, 2, 2, 140, 140, 64, 64), torch.float32, device)
    torch.manual_seed(1)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    again, seed = attention(q, k, v, dropout_p=0.5), draw_seed(q.device)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    for same in (seed, int(seed)):
        assert torch.equal(second, attention(q, k, v, dropout_p=0.5, dropout_seed=same))


def same_bits_each_time(dtype: torch.dtype, device: str) -> None:
    for head_dim in (64, 128):
        case = Case(2, 8, 4, 700, 700, head_dim, head_dim, dropout_p=0.1)
        inputs, options = tensors(case, dtype, device), options_on(device, case)
        first = run(attention, *inputs, **options)
        for _ in range(REPEATS):
            assert_equal(run(attention, *inputs, **options), first)


def gradients_are_differences(device: str) -> None:
    for case in (
        Case(1, 4, 2, 5, 7, 3, 4),
        Case(2, 2, 1, 6, 4, 5, 2, q_offset=-2, softmax_scale=-0.7),
        Case(1, 2, 2, 4, 9, 4, 3, causal=False, dropout_p=0.3),
    ):
        qkv, _, _ = tensors(case, torch.float64, device)
        options = options_on(device, case)

        def out_and_lse(*qkv: Tensor, options: dict[str, Any] = options) -> tuple[Tensor, Tensor]:
            out, lse = attention(*qkv, return_lse=True, **options)
            return out, lse.masked_fill(lse == -math.inf, 0.0)  # there are no differences of -inf to take

        assert gradcheck(out_and_lse, tuple(t.requires_grad_() for t in qkv))


def bad_input(device: str) -> dict[str, tuple[dict[str, Any], type[Exception]]]:
    """Changes of good input, and what they raise, by the message. On a GPU there are more."""
    x = torch.randn(2, 2, 7, 8, device=device)
    bad: dict[str, tuple[dict[str, Any], type[Exception]]] = {
        "k must have dtype float32, got float64": ({"k": x.double()}, TypeError),
        "q and k must have the same head_dim, got 8 and 7": ({"k": x[..., :7]}, ValueError),
        "softmax_scale must be finite, got nan": ({"softmax_scale": math.nan}, ValueError),
        "q_offset must have shape [2], got [3]": ({"q_offset": torch.arange(3, device=device)}, ValueError),
    }
    if device == "cpu":
        return bad
    wide, keys = torch.randn(2, 2, 7, 257, device=device), x[:1, :1, :1].expand(1, 1, 2**31, 8)
    one = {"q": x[:1, :1, :1], "k": keys, "v": keys}
    return bad | {
        f"k must be on q's device, got cpu and {x.device}": ({"k": x.cpu()}, ValueError),
        f"q_offset must be on q's device, got cpu and {x.device}": ({"q_offset": torch.arange(2)}, ValueError),
        f"dropout_seed must be on q's device, got cpu and {x.device}": (
            {"dropout_p": 0.5, "dropout_seed": torch.tensor(1)},
            ValueError,
        ),
        "on CUDA head_dim must be at most 256, got 257 for q": ({"q": wide, "k": wide}, NotImplementedError),
        "on CUDA head_dim must be at most 256, got 8 for q and k and 257": ({"v": wide}, NotImplementedError),
        "on CUDA a KV head must have at most 2147483391 query rows and keys, got 1": (one, NotImplementedError),
    }


def refusal(arguments: dict[str, Any]) -> Exception | None:
    try:
        attention(**arguments)
    except Exception as error:
        return error
    return None


def bad_input_is_refused(device: str) -> None:
    x = torch.randn(2, 2, 7, 8, device=device)
    for message, (changes, kind) in bad_input(device).items():
        error = refusal({"q": x, "k": x, "v": x} | changes)
        assert isinstance(error, kind), f"{message}: {error!r}"
        assert str(error).startswith(f"pyattn: {message}"), str(error)


def checks(device: str) -> dict[str, Check]:
    laws = (nan_that_is_seen_arrives, rows_that_see_nothing, every_element_is_written, dropout_is_that_of_the_cpu)
    named = {f"{law.__name__} {dtype}": partial(law, dtype, device) for law in laws for dtype in DTYPES}
    named |= {f"same_bits_each_time {dtype}": partial(same_bits_each_time, dtype, device) for dtype in DTYPES}
    named |= {
        f"unseen_changes_nothing {d}x{dv} {dtype}": partial(unseen_changes_nothing, dtype, device, d, dv)
        for (d, dv), dtype in itertools.product(HEAD_DIMS, DTYPES)
    }
    others = (the_generator_gives_seeds, gradients_are_differences, bad_input_is_refused)
    return named | {check.__name__: partial(check, device) for check in others}
