"""Promise: set_row_invariant reaches backward and compiled graphs, is set back, and refuses what cannot follow it."""

import pytest
import torch
from support import fresh
from support.assertions import refused
from support.cases import Case, assert_equal
from torch import Tensor

import pyattn
from pyattn import attention, attention_with_cache, set_row_invariant
from pyattn.distributed import ring_attention
from pyattn.distributed.agreement.checks import DIMS, check_dims
from pyattn.distributed.cache.call import check_kinds
from pyattn.ops.row_invariance import row_invariant


def few(dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    case = Case(1, 2, 2, 3, 400, 64, 64)
    return case.drawn(dtype)


def test_backward_follows_its_forward() -> None:
    (q, k, v), dout, _ = few()
    found = {}
    for forward in (False, True):
        for backward in (False, True):
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            with set_row_invariant(forward):
                out = attention(*leaves)
            with set_row_invariant(backward):
                found[forward, backward] = torch.autograd.grad(out, leaves, dout)
            with set_row_invariant(forward):
                out, pull = torch.func.vjp(attention, q, k, v)
            with set_row_invariant(backward):
                assert_equal(pull(dout), found[forward, backward])
    for forward in (False, True):
        assert_equal(found[forward, True], found[forward, False])
    assert not torch.equal(found[True, True][0], found[False, False][0])


def test_compiled_graphs_follow_the_setting() -> None:
    (q, k, v), dout, _ = few()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for setting in (False, True, False):
        with set_row_invariant(setting):
            found = []
            for function in (compiled, attention):
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                out = function(*leaves)
                found.append([out, *torch.autograd.grad(out, leaves, dout)])
            assert_equal(*found)


def test_second_derivatives_run() -> None:
    (q, k, v), _, _ = few(torch.float64)
    with set_row_invariant(True):
        assert torch.autograd.gradgradcheck(attention, [t[:, :, -4:, :3].clone().requires_grad_() for t in (q, k, v)])


def test_the_setting_is_set_back() -> None:
    assert not row_invariant()
    with set_row_invariant(True):
        with set_row_invariant(False):
            assert not row_invariant()
        assert row_invariant()
    with pytest.raises(KeyError), set_row_invariant(True):
        raise KeyError
    assert not row_invariant()
    set_row_invariant(True)
    assert row_invariant()
    set_row_invariant(False)


def test_environment() -> None:
    code = "from pyattn.ops.row_invariance import row_invariant; print(row_invariant())"
    for value, said in (("1", "True"), ("0", "False"), ("", "False")):
        assert fresh.python("-c", code, PYATTN_ROW_INVARIANT=value).stdout.strip() == said
    wrong = fresh.python("-c", code, PYATTN_ROW_INVARIANT="yes")
    assert "pyattn: PYATTN_ROW_INVARIANT in the environment must be 0 or 1, got 'yes'" in wrong.stderr


def test_refusals() -> None:
    with refused(TypeError, "row_invariant must be a bool, got int"):
        set_row_invariant(1)  # type: ignore[arg-type]
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    ring = pyattn.KVCache(1, 2, 16, 8, window=(3, 0))
    ring.append(k, v)
    with set_row_invariant(True):
        with refused(
            NotImplementedError, "attention over a ring buffer must not be called with set_row_invariant(True)"
        ):
            attention_with_cache(q, ring)
        with refused(NotImplementedError, "ring_attention must not be called with set_row_invariant(True)"):
            check_dims(ring_attention, (q, k, v), DIMS)
        with refused(NotImplementedError, "attention must not be called with set_row_invariant(True)"):
            check_kinds(attention, q, pyattn.KVCache(1, 2, 16, 8))
