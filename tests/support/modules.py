"""One small instance of every module of pyattn.nn, its plain twin, and comparisons of the two."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyattn import KVCache, nn, reference

D_IN = 12
D_OUT = 8
CONTEXT_LENGTH = 19

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "SimplifiedSelfAttention": (),
    "SelfAttention_v1": (D_IN, D_OUT),
    "SelfAttention_v2": (D_IN, D_OUT, True),
    "CausalAttention": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, True),
    "MultiHeadAttentionWrapper": (D_IN, D_OUT // 2, CONTEXT_LENGTH, 0.0, 2, True),
    "MultiHeadAttention": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 2, True),
    "SingleHeadSelfAttention": (D_IN, D_OUT),
    "MultiHeadLatentAttention": (D_IN, 2, 5, 7, 6, 4, 3, 0.0, True),
    "Attention": (D_IN, 3),
    "GroupedQueryAttention": (D_IN, D_OUT, 0.0, 4, 2, None, True),
    "Ch03_MHA_Wrapper": (D_IN, D_OUT // 2, CONTEXT_LENGTH, 0.0, 2, True),
    "MultiHeadAttentionCombinedQKV": (D_IN, D_OUT, 2, CONTEXT_LENGTH, 0.0, True),
    "MHAEinsum": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 2, True),
    "MHAPyTorchScaledDotProduct": (D_IN, D_OUT, 2, CONTEXT_LENGTH),
    "MHAPyTorchSDPAWithoutFlash": (D_IN, D_OUT, 4, CONTEXT_LENGTH, 0.0, True),
    "MHAPyTorchClass": (D_IN, D_IN, 3, CONTEXT_LENGTH, 0.0, True),
    "MHAPyTorchFlexAttention": (D_IN, D_OUT, 1, CONTEXT_LENGTH),
    "book.MultiHeadLatentAttention": (D_IN, D_OUT, 0.0, 2, False, 5),
    "MultiHeadAttentionWithSWA": (D_IN, D_OUT, 0.0, 2, True, 4),
    "GatedMultiHeadAttention": (D_IN, D_OUT, CONTEXT_LENGTH, 0.0, 2, True),
}

every_module = pytest.mark.parametrize("name", ARGUMENTS)

EXTRAS: dict[str, dict[str, Any]] = {
    "window": {"window": (2, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "rotary": {"rotary": 100.0},
    "all": {"window": (3, -1), "softcap": 2.0, "alibi": True, "sinks": True, "rotary": 10000.0},
}
ROWS = 9

WITH_RANGES = {
    "CausalAttention": (),
    "MultiHeadAttentionWrapper": (),
    "MultiHeadAttention": (),
    "Attention": (),
    "GroupedQueryAttention": (),
    "MultiHeadLatentAttention": (),
    "Ch03_MHA_Wrapper": (),
    "MultiHeadAttentionCombinedQKV": (),
    "MHAEinsum": (),
    "MHAPyTorchScaledDotProduct": (),
    "MHAPyTorchSDPAWithoutFlash": (),
    "MHAPyTorchFlexAttention": (),
    "MHAPyTorchClass": (D_IN, D_IN, 3, ROWS),
    "book.MultiHeadLatentAttention": (),
    "MultiHeadAttentionWithSWA": (),
    "GatedMultiHeadAttention": (),
}
"""Modules that take key_ranges, mask and bias, with their arguments if not the usual ones."""

WITH_EXTRAS = ("MultiHeadAttention", "Attention", "GroupedQueryAttention")


def class_of(name: str, home: Any = nn) -> Any:
    """The class of this name in pyattn.nn or pyattn.reference, or among the book's variants there.

    A name that both have is the book's after "book.".
    """
    if name.startswith("book."):
        return getattr(home.book, name.removeprefix("book."))
    return getattr(home if hasattr(home, name) else home.book, name)


def pair(name: str, *arguments: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The native and the plain module, both made with the same seed."""
    made = []
    for home in (nn, reference):
        torch.manual_seed(123)
        made.append(class_of(name, home)(*(arguments or ARGUMENTS[name])))
    return made[0], made[1]


def doubles(name: str, *arguments: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The pair in float64."""
    native, plain = pair(name, *arguments)
    return native.double(), plain.double()


def sequences(batch: int, seqlen: int) -> Tensor:
    """Input of a module in float64."""
    return torch.randn(batch, seqlen, D_IN, dtype=torch.float64)


def set_dropout(module: torch.nn.Module, p: float) -> None:
    """Sets dropout in all modules inside, whether it is a module or a number."""
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = p
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = p


def output(module: torch.nn.Module, x: Tensor) -> Tensor:
    """The module's output, without the weights that SingleHeadSelfAttention adds."""
    out = module(x)
    return out[0] if isinstance(out, tuple) else out


def error(x: Tensor, exact: Tensor) -> float:
    """The largest absolute error, relative to the largest exact value."""
    return (x.double() - exact).abs().max().item() / max(exact.abs().max().item(), torch.finfo(torch.float64).tiny)


def assert_same(x: Tensor, exact: Tensor) -> None:
    """Asserts that two float64 results differ by rounding only."""
    assert x.dtype == exact.dtype == torch.float64
    assert x.shape == exact.shape
    assert error(x, exact) <= 1e-12


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(out.sin().sum(), leaves))


def slopes_of_the_paper(n: int) -> list[float]:
    """As in https://github.com/ofirpress/attention_with_linear_biases, fairseq/models/transformer.py."""

    def of_power_of_2(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_power_of_2(closest) + slopes_of_the_paper(2 * closest)[0::2][: n - closest]


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary embedding of (B, T, H, D) by complex numbers."""
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[1]).double(), base ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([z.real, z.imag], -1)


def plain(
    module: torch.nn.Module,
    x: Tensor,
    mask: Tensor | None = None,
    key_ranges: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and weights of the module in plain PyTorch; in training, with dropout from the same generator state.

    ``mask``: True = masked out.
    """
    of_caller = isinstance(module, nn.Attention)
    names = ("W_q", "W_k", "W_v", "W_o") if of_caller else ("W_query", "W_key", "W_value", "out_proj")
    *projections, project = (getattr(module, name) for name in names)
    q, k, v = (p(x).unflatten(-1, (-1, module.head_dim)) for p in projections)
    if module.rotary is not None:
        q, k = turned(q, module.rotary), turned(k, module.rotary)
    slopes = torch.tensor(slopes_of_the_paper(module.num_heads), dtype=x.dtype) if module.alibi else None
    out, weights = reference.attention(
        *(t.transpose(1, 2) for t in (q, k, v)),
        causal=not of_caller,
        window=module.window,
        softcap=module.softcap,
        alibi_slopes=slopes,
        sinks=module.sinks,
        mask=None if mask is None else ~mask,
        bias=bias,
        key_ranges=key_ranges,
        dropout_p=module.dropout.p if module.training else 0.0,
        return_weights=True,
    )
    return project(out.transpose(1, 2).flatten(2)), weights


def made(name: str, extra: str = "") -> torch.nn.Module:
    """One of WITH_EXTRAS in float64, with nonzero sinks."""
    module = class_of(name)(*ARGUMENTS[name], **EXTRAS.get(extra, {})).double()
    if module.sinks is not None:
        assert not module.sinks.any()
        torch.nn.init.normal_(module.sinks)
    return module


CACHED = (
    *WITH_EXTRAS,
    "MHAEinsum",
    "MHAPyTorchScaledDotProduct",
    "MultiHeadLatentAttention",
    "book.MultiHeadLatentAttention",
    "GatedMultiHeadAttention",
)
"""Modules that take a cache."""


def made_cached(name: str, extra: str = "") -> torch.nn.Module:
    """One of CACHED in float64, with the extra if it takes any."""
    return made(name, extra) if name in WITH_EXTRAS else doubles(name)[0]


def cache_for(module: torch.nn.Module, batch: int = 2, seqlen: int = CONTEXT_LENGTH, **options: Any) -> KVCache:
    """A cache that fits the module."""
    if isinstance(module, nn.MultiHeadLatentAttention):
        columns = module.kv_lora_rank + module.qk_rope_head_dim
        options |= {"head_dim_v": module.kv_lora_rank, "shared_values": True}
        return KVCache(batch, 1, seqlen, columns, dtype=torch.float64, **options)
    if isinstance(module, nn.book.MultiHeadLatentAttention):
        return KVCache(batch, 1, seqlen, module.latent_dim, shared_values=True, dtype=torch.float64, **options)
    heads = getattr(module, "num_heads_kv", None) or getattr(module, "num_kv_groups", None) or module.num_heads
    return KVCache(batch, heads, seqlen, module.head_dim, dtype=torch.float64, **options)


def arguments(module: torch.nn.Module, begin: int, end: int, keys: int) -> tuple[Tensor, ...]:
    """The causal mask for Attention, whose caller passes it; nothing for other modules."""
    if not isinstance(module, nn.Attention):
        return ()
    return (nn.causal_mask(max(end, keys))[:, :, begin:end, :keys],)
