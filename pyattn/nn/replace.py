"""Layers that may have been replaced: a matrix, norms, dropout and its hooks."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from pyattn.derivatives.grouped_products import sum_over_visible_keys
from pyattn.options.checks import check_type
from pyattn.weights.attention_weights import attention_weights


def weight_of(name: str, layer: nn.Module) -> Tensor:
    """The matrix that the layer of this name is; NotImplementedError unless it is a Linear without bias."""
    bias: Tensor | None = getattr(layer, "bias", None)
    if not isinstance(layer, nn.Linear) or bias is not None:
        raise NotImplementedError(
            f"pyattn: {name} must be nn.Linear without bias over a kv_cache, which absorbs its weight, got {layer}"
        )
    return layer.weight


def normed(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's result in the dtype of ``x``: under autocast, its weight has another one."""
    dtype = getattr(getattr(layer, "weight", None), "dtype", x.dtype)
    result: Tensor = layer(x.to(dtype)).to(x.dtype)
    return result


class Norms(NamedTuple):
    """Norms of queries and keys before a rotation, over the columns of each head, or of ``all_heads`` at once."""

    q: nn.Module | None
    k: nn.Module | None
    all_heads: bool

    def of(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """``x`` (B, T, H, head_dim), normed."""
        if norm is None:
            return x
        return normed(norm, x.flatten(2)).view(x.shape) if self.all_heads else normed(norm, x)


def check_dropout(p: float) -> float:
    """A constructor's ``dropout``, or TypeError or ValueError."""
    check_type("dropout", p, int, float)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"pyattn: dropout must be between 0 and 1, got {p}")
    return p


def make_dropout(p: float) -> nn.Dropout:
    """The module ``dropout`` for a constructor's argument."""
    return nn.Dropout(check_dropout(p))


def dropout_probability(dropout: nn.Module | float | None) -> float:
    """The probability that ``dropout`` stands for now; ``nn.Identity`` in its place switches dropout off."""
    if isinstance(dropout, (int, float)):
        return check_dropout(dropout)
    if dropout is None or isinstance(dropout, nn.Identity):
        return 0.0
    if not isinstance(dropout, nn.Dropout):
        raise TypeError(f"pyattn: dropout must be nn.Dropout or nn.Identity, got {type(dropout).__name__}")
    return dropout.p if dropout.training else 0.0


def has_hooks(dropout: nn.Module | float | None) -> bool:
    """Whether hooks are registered on the module ``dropout``: they see weights, which otherwise never exist."""
    if not isinstance(dropout, nn.Module):
        return False
    before = dropout._forward_pre_hooks or dropout._backward_pre_hooks
    return bool(before or dropout._forward_hooks or dropout._backward_hooks)


def attend_by_weights(
    q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module, need_weights: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """:func:`pyattn.nn.heads.attend` by weights (B, H, T, T) in memory, for the hooks of ``dropout``."""
    for name in ("kv_cache", "packed", "lengths", "dropout_seed"):
        if options.pop(name, None) is not None:
            what = {"packed": "a jagged x", "dropout_seed": "tensor_parallel"}.get(name, name)
            raise NotImplementedError(f"pyattn: hooks on dropout are not supported with {what}, got {dropout}")
    dropout_probability(dropout)
    options = {name: value for name, value in options.items() if value is not None}
    before = attention_weights(q, k, **options)
    visible = before != 0.0  # first, since dropout may work in place; a dropped key is visible too
    weights: Tensor = dropout(before)
    out = sum_over_visible_keys(weights, v, visible | (weights != 0.0))
    return out, weights if need_weights else None
