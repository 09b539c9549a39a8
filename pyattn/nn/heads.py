"""From projected tensors to attention over heads."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor

from pyattn.attention import attention
from pyattn.cache import KVCache
from pyattn.cache.attention import attention_with_cache
from pyattn.cache.call_gradients import appended, lengths_before, withdraw
from pyattn.jagged.layout import like, positions_of, tokens
from pyattn.masks.key_ranges import plain
from pyattn.nn.checks import Lengths, check_added, check_alone, check_append, check_pairs, quotient
from pyattn.nn.replace import Norms, attend_by_weights, dropout_probability, has_hooks
from pyattn.nn.rotary import check_positions, check_tables, turn_heads
from pyattn.options.checks import check_between, check_sizes, check_type
from pyattn.options.dropout import draw_seed
from pyattn.weights.attention_weights import attention_weights

Output = Tensor | tuple[Tensor, Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout: nn.Module | float | None = None,
    need_weights: bool = False,
    kv_cache: KVCache | None = None,
    lengths: Lengths | None = None,
    packed: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over (B, H, T, D): out, and weights if requested, both with one dropout seed.

    ``packed``: a jagged tensor whose sequences the T tokens are, packed; B is then 1, and there are neither weights nor
    a cache.

    With ``kv_cache``, k and v are appended to it first, the first ``lengths[b]`` rows of each sequence, and q attends
    to the whole cache; in a cache with shared values, v is columns of k. An error leaves the cache as it was. Options
    that are None are left out: each option passed on costs a small call 1 us.
    """
    if has_hooks(dropout):
        options |= {"kv_cache": kv_cache, "lengths": lengths, "packed": packed, "need_weights": need_weights}
        return attend_by_weights(q, k, v, dropout, **options)  # type: ignore[arg-type]
    options = {name: value for name, value in options.items() if value is not None}
    dropout_p = dropout_probability(dropout)
    if dropout_p == 1.0:  # every weight is dropped, and attention only takes dropout_p below 1
        options |= {"need_weights": need_weights, "kv_cache": kv_cache, "lengths": lengths, "packed": packed}
        out, weights = attend(q, k, v, **options)
        return out * 0.0, None if weights is None else weights * 0.0
    if dropout_p:
        options["dropout_p"] = dropout_p
    if dropout_p and need_weights and "dropout_seed" not in options:
        options["dropout_seed"] = draw_seed(q.device)
    if packed is not None:
        result: Any = attention(*(like(t[0], packed) for t in (q, k, v)), **options)
        return result.values()[None], None
    if kv_cache is None:
        result = attention(q, k, v, **options)
        return result, attention_weights(q, k, **options) if need_weights else None
    cache = appended(kv_cache, k, None if kv_cache.shared_values else v, lengths)
    try:
        result = attention_with_cache(q, cache, **options)
        return result, attention_weights(q, cache, **options) if need_weights else None
    except Exception:
        withdraw(kv_cache, k.shape[2])
        raise


def _both(own_mask: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The module's mask and its caller's combined, True = takes part."""
    return own_mask if mask is None else mask if own_mask is None else own_mask & mask


def attend_single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    own_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> Output:
    """:func:`attend` over one head, (B, T, D), (T, D) or jagged; masks as :func:`attend_heads` takes them."""
    if isinstance(q, NestedTensor):
        check_alone(q, mask=mask, bias=bias, need_weights=options.get("need_weights"))
        out, _ = attend(*(_one_head(tokens(t)) for t in (q, k, v)), packed=q, **options)
        return like(out[0, 0], q, 1)
    batched = q.dim() == 3
    batch, seqlen = q.shape[0] if batched else 1, q.shape[-2]
    check_added(mask, bias, (batch, 1, seqlen, seqlen))
    options |= {"mask": _both(own_mask, mask), "bias": bias}
    out, weights = attend(*(_one_head(t if batched else t[None]) for t in (q, k, v)), **options)
    first = (slice(None), 0) if batched else (0, 0)
    return output_of(out[first], None if weights is None else weights[first])


def _one_head(x: Tensor) -> Tensor:
    """(B, T, D) as (B, 1, T, D), strided as :func:`attend_heads` makes it."""
    return x.unsqueeze(2).transpose(1, 2)


def attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int,
    *,
    own_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    norms: Norms | None = None,
    rotary: float | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    kv_cache: KVCache | None = None,
    lengths: Lengths | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend` over (B, T, H * head_dim), the heads split and merged by views; ``rotary``: the base, if any.

    ``position_embeddings``: the caller's (cos, sin) in place of ``rotary``. ``positions`` (B or 1, T): those of the
    tokens, for either; default: their places in the cache. ``own_mask``, the module's, and ``mask``, its caller's, are
    bool, True = takes part. H is read from the tensors: under tensor parallelism a projection yields this rank's heads
    only. Jagged q, k and v (B, j, H * head_dim) give a jagged out.
    """
    packed = None
    if isinstance(q, NestedTensor):
        given = {"mask": mask, "bias": bias, "positions": positions, "kv_cache": kv_cache, "lengths": lengths}
        check_alone(q, **given, need_weights=options.get("need_weights"))
        packed, turned = q, rotary is not None or position_embeddings is not None
        positions = positions_of(q)[None] if turned else None
        q, k, v = (tokens(t) for t in (q, k, v))
    else:
        check_positions(positions, rotary, options.get("alibi_slopes"), q, position_embeddings is not None)
    check_tables(position_embeddings, q, head_dim, rotary, positions, kv_cache is not None)
    q, k, v = (torch.unflatten(t, -1, (-1, head_dim)) for t in (q, k, v))
    if norms is not None:
        q, k = norms.of(norms.q, q), norms.of(norms.k, k)
    check_pairs(mask, bias, q, k, kv_cache)
    if kv_cache is not None:
        options["key_ranges"] = plain(options.get("key_ranges"), options.get("causal", True))
        check_append(kv_cache, k, options["key_ranges"], mask, bias)
    if rotary is not None or position_embeddings is not None:
        first = None if kv_cache is None else lengths_before(kv_cache)
        q, k = turn_heads(q, k, rotary, position_embeddings, first, positions, interleaved)
    options |= {"kv_cache": kv_cache, "lengths": lengths, "mask": _both(own_mask, mask), "bias": bias}
    out, weights = attend(*(t.transpose(1, 2) for t in (q, k, v)), packed=packed, **options)
    out = out.transpose(1, 2).flatten(2)
    return out if packed is None else like(out[0], packed, 1), weights


def attend_shared(
    q: Tensor,
    kv_from: tuple[Tensor, Tensor] | KVCache,
    head_dim: int,
    *,
    own_mask: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    norms: Norms | None = None,
    rotary: float | None = None,
    interleaved: bool = False,
    positions: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`attend_heads` of q (B, T, H * head_dim) over the keys and values of another module.

    ``kv_from``: (k, v), each (B, Hkv, S, D), whose last T rows are those of q's tokens; or a cache that has them.
    """
    check_alone(q, kv_from=kv_from)
    check_type("kv_from", kv_from, tuple, KVCache)
    for name in ("kv_cache", "lengths"):
        if options.pop(name, None) is not None:
            raise ValueError(f"pyattn: kv_from must come without {name}, got both")
    q = torch.unflatten(q, -1, (-1, head_dim))
    batch, seqlen = q.shape[:2]
    cache = None
    if isinstance(kv_from, KVCache):
        cache = kv_from
        if cache.last_append is not None:
            raise NotImplementedError("pyattn: kv_from must have no padding, got a cache after an append with lengths")
        num_heads_kv = cache.k.shape[1 if cache.block_table is None else 2]
        none = len(cache.lengths), num_heads_kv, 0  # they are there already
        k, v = (t.new_empty(*none, t.shape[-1], dtype=cache.dtype) for t in (cache.k, cache.v))
        if cache.lengths.is_cpu:  # a GPU's would have to be waited for
            check_between("the lengths of kv_from, which has x's tokens,", cache.lengths, seqlen)
    else:
        k, v = kv_from
    if k.dim() != 4 or k.shape[0] != batch or (cache is None and k.shape[2] < seqlen):
        raise ValueError(
            "pyattn: kv_from must be k and v (batch, num_heads_kv, keys, head_dim), at least as many keys as x has "
            f"tokens, got k {tuple(k.shape)} for batch {batch} and {seqlen} tokens"
        )
    first = torch.full((batch,), k.shape[2], device=q.device) if cache is None else cache.lengths
    check_positions(positions, rotary, options.get("alibi_slopes"), q, position_embeddings is not None)
    check_tables(position_embeddings, q.flatten(2), head_dim, rotary, positions, True)
    q = q if norms is None else norms.of(norms.q, q)
    q, _ = turn_heads(q, q[:, :, :0], rotary, position_embeddings, first - seqlen, positions, interleaved)
    check_pairs(mask, bias, q, k.transpose(1, 2), cache)
    options |= {"kv_cache": cache, "mask": _both(own_mask, mask), "bias": bias}
    out, weights = attend(q.transpose(1, 2), k, v, **options)
    return out.transpose(1, 2).flatten(2), weights


class Heads(nn.Module):
    """A module whose projections yield ``num_heads`` heads side by side."""

    def set_sizes(self, d_in: int, d_out: int, num_heads: int) -> None:
        """Checks and stores the sizes, and the width of a head."""
        check_sizes(1, d_in=d_in)
        self.d_in = d_in
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim: int = quotient("d_out", d_out, "num_heads", num_heads)

    def attend(self, projection: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Output:
        """The result of ``forward``: :func:`attend_heads`, then the module's last projection."""
        out, weights = attend_heads(q, k, v, self.head_dim, **self.drawn(options, q.device))
        return output_of(self.project(projection, out), weights)

    def attend_shared(
        self, projection: nn.Module, q: Tensor, kv_from: tuple[Tensor, Tensor] | KVCache, **options: Any
    ) -> Output:
        """:meth:`attend` over another module's keys and values: :func:`attend_shared`."""
        out, weights = attend_shared(q, kv_from, self.head_dim, **self.drawn(options, q.device))
        return output_of(self.project(projection, out), weights)

    def common(self, x: Tensor) -> Tensor:
        """``x``, which all heads read; under tensor parallelism, its gradient is summed over the ranks here."""
        return x

    def drawn(self, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """The options of :func:`attend`; under tensor parallelism, with a seed if dropout needs one."""
        return options

    def project(self, projection: nn.Module, out: Tensor) -> Tensor:
        """The module's last projection, over the heads' results side by side."""
        projected: Tensor = projection(out)
        return projected


def output_of(out: Tensor, weights: Tensor | None) -> Output:
    """The result of ``forward``: ``out``, with the weights if there are any."""
    return out if weights is None else (out, weights)


def out_and_weights(result: Output) -> tuple[Tensor, Tensor | None]:
    """The inverse of :func:`output_of`."""
    return result if isinstance(result, tuple) else (result, None)
