"""Promise: torch's varlen_attn works on the CPU while activated: forward, backward, lse, and every argument."""

import inspect

import pytest
import torch
from support import fresh
from support.adapters.gradients import assert_accurate, with_gradients
from support.assertions import refused
from support.cases import assert_equal
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    varlen,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from pyattn import attention_varlen, reference
from pyattn.adapters import torch_varlen

KNOWN = inspect.signature(varlen_attn).parameters
GROUPED = {"enable_gqa": True} if "enable_gqa" in KNOWN else {}  # torch 2.11 always groups heads
newer = pytest.mark.skipif("seqused_k" not in KNOWN, reason="varlen_attn has it from torch 2.12 on")

LENGTHS_Q, LENGTHS_K = (10, 0, 33, 1, 20), (10, 4, 50, 7, 5)


pytestmark = pytest.mark.usefixtures("torchs_varlen")


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


CU_Q, CU_K = bounds(LENGTHS_Q), bounds(LENGTHS_K)
SIZES = CU_Q, CU_K, max(LENGTHS_Q), max(LENGTHS_K)


def inputs(dtype=torch.float32, head_dim=16):
    sizes = (sum(LENGTHS_Q), 6), (sum(LENGTHS_K), 2), (sum(LENGTHS_K), 2)
    return tuple(torch.randn(*size, head_dim, dtype=dtype, requires_grad=True) for size in sizes)


def plain(q, k, v, window, **options):
    return reference.attention_varlen(q, k, v, *SIZES, causal=False, window=window, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)], ids=str)
def test_accuracy(dtype, window):
    def native(q, k, v):
        return varlen_attn(q, k, v, *SIZES, window_size=window, scale=0.3, **GROUPED)

    assert_accurate(native, lambda *qkv: plain(*qkv, window, softmax_scale=0.3), *inputs(dtype))


def test_lse():
    q, k, v = inputs()
    out, lse = varlen_attn(q, k, v, *SIZES, window_size=(-1, 0), return_aux=AuxRequest(lse=True), **GROUPED)
    assert lse.shape == (6, len(q))
    assert lse.dtype == torch.float32
    _, expected = plain(q.double(), k.double(), v.double(), (-1, 0), return_lse=True)
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)
    unseeing = CU_Q[4] + 20 - 5 - 1  # of 20 queries on 5 keys, 15 are before the first key
    assert not out[CU_Q[4] : unseeing + 1].any()
    assert (lse[:, CU_Q[4] : unseeing + 1] == float("-inf")).all()


def test_a_sequence_alone_has_the_same_bits():
    """torch promises this for num_splits=1."""
    q, k, v = (t.detach() for t in inputs())
    out, lse = varlen_attn(q, k, v, *SIZES, return_aux=AuxRequest(lse=True), **GROUPED)
    for b, lengths in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        queries, keys = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        sizes = *(bounds([length]) for length in lengths), *lengths
        alone = varlen_attn(q[queries], k[keys], v[keys], *sizes, return_aux=AuxRequest(lse=True), **GROUPED)
        assert torch.equal(alone[0], out[queries])
        assert torch.equal(alone[1], lse[:, queries])


@newer
def test_out_variant():
    q, k, v = (t.detach() for t in inputs())
    out = torch.full_like(q, float("nan"))
    _, lse = varlen.varlen_attn_out(out, q, k, v, *SIZES, return_aux=AuxRequest(lse=True), **GROUPED)
    expected = varlen_attn(q, k, v, *SIZES, return_aux=AuxRequest(lse=True), **GROUPED)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@newer
def test_used_keys_and_pages():
    q, k, v = (t.detach() for t in inputs())
    used = torch.tensor([3, 0, 50, 7, 4], dtype=torch.int32)
    expected = attention_varlen(q, k, v, *SIZES, seqused_k=used)
    out = varlen_attn(q, k, v, *SIZES, window_size=(-1, 0), **GROUPED, seqused_k=used, num_splits=1)
    assert torch.equal(out, expected)
    table = torch.randperm(20).reshape(5, 4).to(torch.int32)
    pages_k, pages_v = torch.full((2, 20, 16, 2, 16), float("nan"))
    for b, (begin, count) in enumerate(zip(CU_K.tolist(), used.tolist(), strict=False)):
        for j in range(count):
            page = table[b, j // 16]
            pages_k[page, j % 16], pages_v[page, j % 16] = k[begin + j], v[begin + j]
    options = {"window_size": (-1, 0), "seqused_k": used, "block_table": table, **GROUPED}
    paged = varlen_attn(q, pages_k, pages_v, CU_Q, None, max(LENGTHS_Q), 64, **options)
    torch.testing.assert_close(paged, expected)


def test_a_packed_projection_compiled():
    """q, k and v as views of one tensor, in a graph of torch.compile with its backward."""
    x = torch.randn(64, 3, 4, 16)
    cu = torch.tensor([0, 20, 64], dtype=torch.int32)

    def step(x):
        return varlen_attn(*x.unbind(1), cu, cu, 44, 44, window_size=(-1, 0)).sin()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_equal(with_gradients(step, x), with_gradients(compiled, x))


def test_autocast_does_not_reach_it():
    """As on a GPU: out and the gradients have the inputs' dtype, compiled or not."""

    def step(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return varlen_attn(q, k, v, *SIZES, **GROUPED)

    qkv = inputs()
    wanted = with_gradients(lambda q, k, v: varlen_attn(q, k, v, *SIZES, **GROUPED), *qkv)
    for call in (step, torch.compile(step, backend="aot_eager")):
        assert_equal(with_gradients(call, *qkv), wanted)


@pytest.mark.filterwarnings("ignore")
def test_opcheck():
    q, k, v = inputs()
    torch.library.opcheck(
        torch.ops.torch_attn._varlen_attn.default, (q, k, v, *SIZES, True, None, [-1, 0], *GROUPED.values())
    )


def call(**change):
    q, k, v = (t.detach() for t in inputs())
    arguments = {"query": q, "key": k, "value": v, "cum_seq_q": CU_Q, "cum_seq_k": CU_K, "max_q": 33, "max_k": 50}
    arguments |= {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    return torch.ops.aten._flash_attention_forward(**arguments | change)


@pytest.mark.parametrize(
    ("error", "change", "message"),
    [
        (
            TypeError,
            {"query": torch.ones(64, 6, 16).double()},
            "query must be float32, bfloat16 or float16, as torch's",
        ),
        (NotImplementedError, {"value": torch.ones(76, 2, 8)}, "value must have query's head dimension in torch's "),
        (NotImplementedError, {"dropout_p": 0.5}, "dropout_p must be 0 in torch's varlen_attn, got 0.5"),
        (NotImplementedError, {"return_debug_mask": True}, "return_debug_mask must be False, got True"),
        (NotImplementedError, {"cum_seq_q": None}, "cu_seq_q must be given (pyattn.attention takes dense batches), "),
        (ValueError, {"cum_seq_k": None}, "cu_seq_k must be given unless block_table and seqused_k are, got None"),
        pytest.param(
            ValueError,
            {"block_table": torch.ones(5, 4).int()},
            "block_table must come with seqused_k, got None",
            marks=newer,
        ),
        (ValueError, {"max_q": 3}, "max_seqlen_q "),
    ],
    ids=["dtype", "columns", "dropout", "debug", "dense", "no keys", "pages", "max_q"],
)
def test_errors(error, change, message):
    with refused(error, message):
        call(**change)


@newer
def test_gradients_of_used_keys_are_torchs_error():
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="seqused_k is an inference-only parameter"):
        varlen_attn(q, k, v, *SIZES, seqused_k=torch.ones(5, dtype=torch.int32), **GROUPED)


@newer
def test_out_of_another_shape():
    q, k, v = (t.detach() for t in inputs())
    with refused(ValueError, "out must be torch.float32 of shape (64, 6, 16), got torch.float32 "):
        varlen.varlen_attn_out(torch.empty(64, 6, 8), q, k, v, *SIZES, **GROUPED)


def test_activation_is_torchs_own():
    torch_varlen.activate()
    assert current_flash_attention_impl() == "PYATTN"
    restore_flash_attention_impl()
    torch_varlen.remove()
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(q, k, v, *SIZES, **GROUPED)
    activate_flash_attention_impl("PYATTN")
    assert varlen_attn(q, k, v, *SIZES, **GROUPED).shape == q.shape


def test_importing_pyattn_changes_nothing():
    """Not torch's operator, its table of implementations, or what ``import flash_attn`` finds."""
    code = """if True:
        import sys, torch
        from torch.nn.attention import list_flash_attention_impls
        state = lambda: (torch._C._dispatch_dump_table("aten::scaled_dot_product_attention"), [*sys.meta_path])
        before = state()
        import pyattn
        assert not any(name.startswith("pyattn.adapters") or "flash_attn" in name for name in sys.modules)
        import pyattn.adapters.flash_attn, pyattn.adapters.sdpa, pyattn.adapters.torch_varlen
        assert state() == before
        assert "PYATTN" not in list_flash_attention_impls()
    """
    fresh.python("-c", code).check_returncode()
