"""Cases, how to run them, and the memory they need; yardstick.py judges their accuracy."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import case_options
from support.yardstick import NAMES, Yardsticks, in_double, learned
from torch import Tensor

from pyattn import attention, reference
from pyattn.cli.timing import peak_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

newer_compiler = pytest.mark.skipif(torch.__version__ < "2.12", reason="the compiler of torch 2.11 can't trace this")

exact_cuts = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cuts block masks to whole blocks")

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def alternate(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every second combination, as the squares of one colour: of three lists or more, any two choices still meet."""
    numbered = itertools.product(*map(enumerate, choices))
    return [tuple(x for _, x in pairs) for pairs in numbered if sum(i for i, _ in pairs) % 2 == 0]


Drawn = tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]
"""(q, k, v), dout and dlse."""


@dataclass(frozen=True)
class Case:
    """Sizes and options of a call.

    Attributes:
        key_ranges, mask, bias: words that case_options.py turns into tensors; "": none.
        alibi: the dimensions of the slopes, "h" or "bh"; "": none.
        relative: those of the relative bias, "-" (one for all), "h", "b" or "bh", and its reach, as "h 5"; "": none.
        wide: bias, slopes, sinks and relative bias are float32 whatever q's dtype.
    """

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = True
    q_offset: int | None = None
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    window: tuple[int, int] = (-1, -1)
    key_ranges: str = ""
    mask: str = ""
    softcap: float = 0.0
    bias: str = ""
    alibi: str = ""
    sinks: bool = False
    wide: bool = False
    relative: str = ""

    def __str__(self) -> str:
        sizes = (self.batch, self.num_heads_q, self.num_heads_kv, self.seqlen_q, self.seqlen_k)
        mask = "full" if not self.causal else "causal" if self.q_offset is None else f"offset{self.q_offset}"
        scale = "" if self.softmax_scale is None else f"-scale{self.softmax_scale}"
        dropout = f"-dropout{self.dropout_p}" if self.dropout_p else ""
        window = "" if self.window == (-1, -1) else "-window{},{}".format(*self.window)
        words = (self.key_ranges, f"softcap{self.softcap}" if self.softcap else "", self.bias.replace(" ", "_"))
        words += (f"mask_{self.mask.replace(' ', '_')}" if self.mask else "",)
        words += (f"alibi_{self.alibi}" if self.alibi else "", self.sinks * "sinks", self.wide * "wide")
        words += (f"relative_{self.relative.replace(' ', '_')}" if self.relative else "",)
        more = "".join(f"-{word}" for word in words if word)
        return "x".join(map(str, (*sizes, self.head_dim, self.head_dim_v))) + f"-{mask}{scale}{dropout}{window}{more}"

    @property
    def options(self) -> dict[str, Any]:
        """The options that don't depend on the dtype; :meth:`tensors` has the others."""
        options: dict[str, Any] = {
            "causal": self.causal,
            "q_offset": self.q_offset,
            "softmax_scale": self.softmax_scale,
        }
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "dropout_seed": 0x0123456789ABCDEF}
        if self.window != (-1, -1):
            options["window"] = self.window
        if self.key_ranges:
            sizes = self.batch, self.seqlen_q, self.seqlen_k
            options["key_ranges"] = case_options.key_ranges(self.key_ranges, *sizes)
        if self.softcap:
            options["softcap"] = self.softcap
        return options

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The case's mask, bias, alibi_slopes, sinks and relative_bias, if any, in ``dtype``, or in float32 if wide."""
        dtype, tensors = torch.float32 if self.wide else dtype, {}
        sizes = self.batch, self.num_heads_q, self.seqlen_q, self.seqlen_k
        if self.mask:
            tensors["mask"] = case_options.mask(self.mask, sizes)
        if self.bias:
            tensors["bias"] = case_options.bias(self.bias, sizes, dtype)
        if self.alibi:
            shape = [n for name, n in (("b", self.batch), ("h", self.num_heads_q)) if name in self.alibi]
            tensors["alibi_slopes"] = (torch.rand(shape) - 0.1).to(dtype)
        if self.sinks:
            tensors["sinks"] = (2 * torch.randn(self.num_heads_q)).to(dtype)
        if self.relative:
            dims, reach = self.relative.split()
            shape = [*([self.batch] if "b" in dims else []), self.num_heads_q if "h" in dims else 1, 2 * int(reach) + 1]
            tensors["relative_bias"] = torch.randn(shape).to(dtype)
        return tensors

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normally distributed."""
        return (
            torch.randn(self.batch, self.num_heads_q, self.seqlen_q, self.head_dim).to(dtype),
            torch.randn(self.batch, self.num_heads_kv, self.seqlen_k, self.head_dim).to(dtype),
            torch.randn(self.batch, self.num_heads_kv, self.seqlen_k, self.head_dim_v).to(dtype),
        )

    def gradients(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dout and dlse."""
        rows = (self.batch, self.num_heads_q, self.seqlen_q)
        return torch.randn(*rows, self.head_dim_v).to(dtype), torch.randn(*rows)

    def drawn(self, dtype: torch.dtype) -> Drawn:
        return self.inputs(dtype), *self.gradients(dtype)

    def given(self, dtype: torch.dtype) -> dict[str, Any]:
        """All options."""
        return self.options | self.tensors(dtype)


CASES = [
    Case(1, 1, 1, 1, 1, 1, 1),
    Case(2, 2, 2, 6, 6, 3, 3),
    Case(2, 4, 2, 64, 64, 64, 64),
    Case(1, 3, 1, 65, 63, 80, 72),
    Case(2, 2, 2, 1, 130, 128, 33, causal=False),
    Case(1, 2, 1, 130, 130, 33, 17, q_offset=0),
    Case(1, 1, 1, 100, 30, 16, 16, q_offset=-40),
    Case(1, 2, 1, 70, 100, 16, 16, q_offset=60),
    Case(1, 2, 2, 130, 200, 16, 16, q_offset=33),
    Case(1, 2, 2, 257, 257, 64, 48),
    Case(2, 6, 2, 50, 333, 40, 31, causal=False, softmax_scale=-0.3),
    Case(1, 1, 1, 97, 193, 512, 1, q_offset=5),
    Case(1, 2, 1, 1100, 290, 20, 24),
    Case(1, 9, 9, 33, 200, 24, 24, softmax_scale=1.7),
    Case(1, 2, 2, 20, 120, 8, 8, softmax_scale=0.0),
    Case(1, 2, 2, 20, 120, 8, 8, softmax_scale=1e-30),
    Case(1, 5, 1, 450, 450, 8, 8),
    Case(1, 2, 2, 70, 90, 64, 64, softmax_scale=2.0),
    Case(2, 4, 2, 9, 21, 250, 100, q_offset=3, dropout_p=0.3),
    Case(1, 4, 2, 70, 100, 16, 20, q_offset=-10, dropout_p=0.4),
    Case(2, 4, 2, 70, 130, 16, 20, dropout_p=0.1),
    Case(1, 3, 1, 140, 50, 33, 8, causal=False, dropout_p=0.5),
    Case(1, 2, 2, 300, 300, 32, 32, q_offset=-30, dropout_p=0.9),
]


def seeded(seed: int) -> None:
    """``torch.manual_seed``, which would spend up to 2 ms on a traceback where there is no GPU."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def run(
    attention: Callable[..., Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of ``attention(q, k, v, return_lse=True)``, then gradients of bias, slopes and sinks."""
    leaves = tuple(t.detach().requires_grad_() for t in qkv)
    more = {name: options[name].detach().requires_grad_() for name in learned(options)}
    out, lse = attention(*leaves, return_lse=True, **options | more)
    results, grads = [out], [dout.to(out.dtype)]
    if dlse is not None:
        results, grads = [out, lse], [*grads, dlse.to(lse.dtype)]
    leaves += tuple(more.values())
    return (out.detach(), lse.detach(), *torch.autograd.grad(results, leaves, grads, allow_unused=True))


class Truth:
    """The basis of yardstick.py's rule: plain PyTorch's results in the tensors' dtype, and exact results.

    With ``same``, the exact out, lse, dq, dk and dv come from these equivalent options.
    """

    def __init__(self, drawn: Drawn, options: dict[str, Any], same: dict[str, Any] | None = None) -> None:
        self.drawn, self.options = drawn, options
        self._count = None if same is None else len(NAMES)
        qkv, dout, dlse = drawn
        doubles = tuple(t.double() for t in qkv)
        wanted = in_double(options if same is None else same)
        self.exact = run(reference.attention, doubles, dout.double(), dlse, **wanted)[: self._count]
        self._yardsticks = Yardsticks(self.exact, run, qkv, dout, dlse, **options)

    def assert_allows(self, attend: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The results of ``attend``, forward and backward, asserted to be within their bounds."""
        ours, dtype = run(attend, *self.drawn, **self.options), self.drawn[1].dtype
        assert (ours[0].dtype, ours[1].dtype) == (dtype, torch.promote_types(dtype, torch.float32))
        excesses = self._yardsticks.excesses(ours[: self._count])
        assert max(excesses.values()) <= 1, excesses
        return ours


@functools.cache
def truth_of(case: Case, dtype: torch.dtype, device: torch.device) -> Truth:
    """The case's truth, computed once for all backends of a device."""
    seeded(0)
    return Truth(case.drawn(dtype), case.given(dtype))


def assert_case_accurate(case: Case, dtype: torch.dtype, attend: Callable[..., Any] = attention) -> tuple[Tensor, ...]:
    """Asserts that every result of ``attend``, forward and backward, is accurate by the rule of yardstick.py."""
    return truth_of(case, dtype, torch.get_default_device()).assert_allows(attend)


def assert_equal(a: Iterable[Tensor], b: Iterable[Tensor]) -> None:
    """Asserts that the two results agree to the bit."""
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def memory_needed(call: Callable[[], object]) -> int:
    """The peak rise of resident memory during the call, in bytes; skips the test if the system does not count it."""
    found = peak_memory(call)
    if found is None:
        pytest.skip("needs /proc, as Linux has it")
    return found


def allocated(call: Callable[[], object]) -> int:
    """The most memory that torch's allocator hands out at once during the call, in bytes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
