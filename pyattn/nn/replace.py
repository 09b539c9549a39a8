"""Layers that may have been replaced: their matrix, their result in another dtype, and the norms of heads."""

from typing import NamedTuple

from torch import Tensor, nn


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
