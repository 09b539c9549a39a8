"""The lightning indexer as a module, with the projections of the book's class."""

import torch
from torch import Tensor, nn

from pyattn.options.checks import check_names, check_sizes
from pyattn.selection.keys import top_keys


class LightningIndexer(nn.Module):
    """Scores keys by ``index_n_heads`` narrow heads that share one key per token (DeepSeek-V3.2, equation 1)::

        q_t = W_q_index(x_t),  k_s = W_k_index(x_s),  w_t = W_weights(x_t)
        score_ts = sum_h w_th / sqrt(index_n_heads) relu(<q_th, k_s> / sqrt(index_head_dim))

    Selected keys have no gradient with respect to the indexer. :func:`pyattn.selection.indexer_loss` trains it on the
    results of :meth:`projections`.

    >>> x = torch.rand(1, 10, 64)
    >>> LightningIndexer(64, index_n_heads=4, index_head_dim=16)(x, x, topk=3).shape
    torch.Size([1, 10, 3])
    """

    @check_names
    def __init__(self, d_model: int, index_n_heads: int, index_head_dim: int) -> None:
        super().__init__()
        check_sizes(1, d_model=d_model, index_n_heads=index_n_heads, index_head_dim=index_head_dim)
        self.index_n_heads = index_n_heads
        self.index_head_dim = index_head_dim
        self.W_q_index: nn.Linear = nn.Linear(d_model, index_n_heads * index_head_dim, bias=False)
        self.W_k_index: nn.Linear = nn.Linear(d_model, index_head_dim, bias=False)
        self.W_weights: nn.Linear = nn.Linear(d_model, index_n_heads, bias=False)

    def projections(self, x: Tensor, x_ctx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, Hi, T, Di) and weights (B, Hi, T) of x, k (B, S, Di) of x_ctx; weights include both factors."""
        q = self.W_q_index(x).unflatten(-1, (self.index_n_heads, self.index_head_dim)).transpose(1, 2)
        weights = self.W_weights(x).mT * (self.index_n_heads * self.index_head_dim) ** -0.5
        return q, self.W_k_index(x_ctx), weights

    @check_names
    def forward(self, x: Tensor, x_ctx: Tensor, topk: int, causal_mask: Tensor | None = None) -> Tensor:
        """Keys of x_ctx (B, S, d_model) for each token of x (B, T, d_model): int64 (B, T, min(topk, S)).

        ``causal_mask`` (T, S): 0 where a key is visible and -inf after the token's own, which is at S - T and on; None
        hides none. Of equal scores, such as 0, the lower keys come first. A token that sees fewer keys repeats one,
        one that sees none, as the first T - S with a mask, has -1 alone: a key would be one to attend to.
        """
        seqlen, keys = x.shape[1], x_ctx.shape[1]
        if causal_mask is not None:
            seen = torch.ones(seqlen, keys, dtype=torch.bool, device=x.device).tril(keys - seqlen)
            if causal_mask.shape != seen.shape or not torch.equal(causal_mask == 0, seen):
                raise NotImplementedError(
                    f"pyattn: causal_mask must be 0 up to each token's own key and -inf after it, ({seqlen}, {keys}), "
                    f"got another of shape {tuple(causal_mask.shape)}"
                )
        found = top_keys(*self.projections(x, x_ctx), min(topk, keys), causal=causal_mask is not None)[:, 0].long()
        return torch.where(found < 0, found[..., :1], found)
