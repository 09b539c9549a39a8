"""The code that ranks run for test_neighbours.py: attention within contexts by other functions than torch's own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.ranks.ranks import summed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from pyattn import KVCache, attention, attention_varlen, attention_weights, attention_with_cache, distributed, nn, parts
from pyattn.adapters import flash_attn, flex, sdpa
from pyattn.nn import book

WIDTH, HEADS, LENGTH = 16, 4, 12
OPTIONS: dict[str, Any] = {
    "causal": {},
    "window": {"window": (3, 0), "softcap": 2.0},
    "positions": {
        "alibi_slopes": torch.linspace(0.1, 0.9, HEADS).double(),  # each rank imports this: no random numbers
        "relative_bias": torch.linspace(-1.0, 2.0, 9)[None].double().sin(),
    },
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7, "sinks": torch.zeros(HEADS).double()},
}


def heads(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """q, k and v, (B, heads, T, 4)."""
    return [t.unflatten(2, (HEADS, 4)).transpose(1, 2) for t in layer(x).chunk(3, 2)]


def of_attention(**options: Any) -> Callable[..., Tensor]:
    """A layer's function by pyattn.attention."""
    return lambda layer, x: attention(*heads(layer, x), **options).transpose(1, 2).flatten(2)


def by_flash_attn(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """By flash-attn's function, (B, T, heads, 4)."""
    qkv = (t.transpose(1, 2) for t in heads(layer, x))
    return flash_attn.flash_attn_func(*qkv, causal=True, window_size=(4, 0)).flatten(2)


def by_sdpa(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """By the adapter's function."""
    return sdpa.scaled_dot_product_attention(*heads(layer, x), is_causal=True).transpose(1, 2).flatten(2)


def by_flex(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """Without a mask, by the adapter."""
    out = flex.flex_attention(*heads(layer, x))
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).flatten(2)


LAYERS: dict[str, Callable[..., Any]] = {
    **{name: of_attention(**options) for name, options in OPTIONS.items()},
    "flash_attn_func": by_flash_attn,
    "sdpa": by_sdpa,
    "flex_attention": by_flex,
}


def layer_for(name: str) -> torch.nn.Module:
    """A projection, or the module of :mod:`pyattn.nn` of this name."""
    torch.manual_seed(0)
    if name in LAYERS:
        return torch.nn.Linear(WIDTH, 3 * WIDTH).double()
    kind, _, extra = name.partition(" ")
    module: torch.nn.Module = getattr(nn, kind)(WIDTH, WIDTH, LENGTH, 0.0, HEADS, **({extra: True} if extra else {}))
    return module.double()


def step(group: dist.ProcessGroup, name: str, layout: str | None) -> list[Tensor]:
    """The loss and gradients of a layer, of parts unless layout is None."""
    layer = layer_for(name)
    x, labels = torch.randn(2, 2, LENGTH, WIDTH).double()

    def results() -> list[Tensor]:
        out = LAYERS[name](layer, x) if name in LAYERS else layer(x)
        value = (out - labels).square().sum()
        return [value.detach(), *torch.autograd.grad(value, list(layer.parameters()))]

    if layout is None:
        return results()
    mesh = DeviceMesh.from_group(group, "cpu")
    with distributed.context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1], layout=layout):
        found = results()
    return [summed(t, group) for t in found]


def compiled(group: dist.ProcessGroup) -> list[list[Tensor]]:
    """pyattn.attention eager and in one graph, in contexts of two layouts and outside."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), list[list[Tensor]]()
    torch.compiler.reset()
    graph = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for layout in ("zigzag", None, "contiguous"):
        qkv = [t.clone() for t in torch.randn(3, 1, 2, LENGTH, 8, generator=torch.Generator().manual_seed(1))]
        if layout is None:
            found.append([attention(*qkv), graph(*qkv)])
            continue
        with distributed.context_parallel(mesh, buffers=qkv, buffer_seq_dims=[2] * 3, layout=layout):
            found.append([attention(*qkv), graph(*qkv)])
    return found


def _by_torchs_flex(q: Tensor, **_: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    flex_attention(q, q, q)


def _over_a_cache(q: Tensor, **_: Any) -> None:
    cache = KVCache(1, 2, 8, 8)
    cache.append(q, q)
    attention_with_cache(q, cache)


def _packed(q: Tensor, **_: Any) -> None:
    begins = torch.tensor([0, q.shape[2]])
    attention_varlen(*(q[0].transpose(0, 1),) * 3, begins, begins, q.shape[2], q.shape[2])


def _packed_as_flash_attn(q: Tensor, **_: Any) -> None:
    begins = torch.tensor([0, q.shape[2]], dtype=torch.int32)
    flash_attn.flash_attn_varlen_func(*(q[0].transpose(0, 1),) * 3, begins, begins, q.shape[2], q.shape[2])


def _cached_as_flash_attn(q: Tensor, **_: Any) -> None:
    cache = torch.zeros(2, 1, 8, 2, 8)
    flash_attn.flash_attn_with_kvcache(q.transpose(1, 2), *cache, cache_seqlens=q.shape[2])


def _by_transformers(q: Tensor, **_: Any) -> None:
    from pyattn.adapters import transformers

    transformers.attention_function(torch.nn.Module(), q, q, q, None)


def _masked_flex(q: Tensor, **_: Any) -> None:
    block_mask = flex.create_block_mask(flex.causal(), None, None, q.shape[2], q.shape[2], device="cpu")
    flex.flex_attention(q, q, q, block_mask=block_mask)


REFUSED: dict[str, Callable[..., Any]] = {
    "attention_varlen": _packed,
    "attention_weights": lambda q, **_: attention_weights(q, q),
    "attention_with_cache": _over_a_cache,
    "attention_backward": lambda q, **_: parts.attention_backward(q, q, q, q, q, q[..., 0]),
    "attention_varlen by flash_attn_varlen_func": _packed_as_flash_attn,
    "flash_attn_with_kvcache": _cached_as_flash_attn,
    "flex_attention with a score_mod or block_mask": _masked_flex,
    "flex_attention with a score_mod or block_mask, softcap": lambda q, **_: flex.flex_attention(
        q, q, q, flex.softcap(3.0)
    ),
    "torch's flex_attention": _by_torchs_flex,
    "a rotary embedding without positions=": lambda x, **_: nn.MultiHeadAttention(
        WIDTH, WIDTH, LENGTH, 0.0, HEADS, rotary=1e4
    )(x),
    "attention_weights by need_weights": lambda x, **_: nn.MultiHeadAttention(WIDTH, WIDTH, LENGTH, 0.0, HEADS)(
        x, need_weights=True
    ),
    'attn_implementation="pyattn", unlike "sdpa",': _by_transformers,
    "a module with bias_k": lambda x, **_: book.MHAPyTorchClass(WIDTH, WIDTH, HEADS, LENGTH, qkv_bias=True)(x),
}


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """The error of each of REFUSED on parts; the next call computes."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), {}
    q, x = torch.randn(1, 2, LENGTH, 8), torch.randn(1, LENGTH, WIDTH)
    with distributed.context_parallel(mesh, buffers=[q, x], buffer_seq_dims=[2, 1]):
        for name, call in REFUSED.items():
            try:
                call(q=q, x=x)
                found[name] = "computed"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
            assert attention(q, q, q).isfinite().all()
    return found


def rotary(group: dist.ProcessGroup, layout: str | None) -> Tensor:
    """A module with a rotary embedding that is given the positions."""
    torch.manual_seed(0)
    module = nn.MultiHeadAttention(WIDTH, WIDTH, LENGTH, 0.0, HEADS, rotary=1e4).double()
    x, positions = torch.randn(2, LENGTH, WIDTH).double(), torch.arange(LENGTH)[None].clone()
    if layout is None:
        return module(x, positions=positions)
    mesh = DeviceMesh.from_group(group, "cpu")
    with distributed.context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[1, 1], layout=layout):
        out = module(x, positions=positions)
    return distributed.unshard(out, 1, group, layout=layout)
