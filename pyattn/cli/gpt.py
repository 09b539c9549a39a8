"""A GPT to train: GPT-2's block, with the attention as an argument.

::

    x = token[ids] + position                                    (B, S, width)
    x = x + project(attend(q, k, v)),  q k v = qkv(norm(x))      q, k, v (B, heads, S, width / heads)
    x = x + down(gelu(up(norm(x))))                              4 width inside; both lines `layers` times
    logits = norm(x) token^T                                     (B, S, vocab)

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the code released with it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pyattn
from pyattn.cli import InputError

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Causal attention: q, k, v (B, heads, S, head_dim) and dropout_p to out, shaped like q."""


def attend_pyattn(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """The native kernels."""
    return pyattn.attention(q, k, v, dropout_p=dropout_p)


@dataclass(frozen=True)
class Config:
    """The configuration of a GPT; a checkpoint stores it as JSON.

    Attributes:
        layers: number of blocks.
        heads: attention heads in each block; divides ``width``.
        width: features of a token.
        context: most tokens the model can look at.
        vocab: number of distinct tokens; 256 for bytes.
        dropout: probability of dropping an embedding, an attention weight or a block's output while training.
    """

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 256
    vocab: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocab"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1", getattr(self, name))
        if self.width % self.heads:
            raise InputError("width must be a multiple of heads", f"{self.width} and {self.heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise InputError("dropout must lie in [0, 1)", self.dropout)


class Block(nn.Module):
    """Attention, then an MLP, each with pre-normalisation and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """``x`` (B, S, width) to the same shape; q, k and v are strided views, so nothing is copied for ``attend``."""
        dropout_p = self.dropout if self.training else 0.0
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, dropout_p).transpose(1, 2).flatten(2)
        x = x + nn.functional.dropout(self.project(out), dropout_p)
        hidden = nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh")
        return x + nn.functional.dropout(self.down(hidden), dropout_p)


class GPT(nn.Module):
    """Token ids (B, S) to logits (B, S, vocab); ``attend`` may be replaced at any time."""

    def __init__(self, config: Config, attend: Attend = attend_pyattn) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's initialisation: std 0.02, over sqrt(2 layers) for what is added to the residual stream; biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                joins_stream = name.endswith(("project.weight", "down.weight"))
                sums = 2 * self.config.layers if joins_stream else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(sums))

    def forward(self, ids: Tensor) -> Tensor:
        """``ids``: int64 (B, S), S at most ``config.context``. Returns logits (B, S, vocab)."""
        if ids.shape[1] > self.config.context:
            raise InputError(f"tokens must fit the context of {self.config.context}", ids.shape[1])
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = nn.functional.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, self.attend)
        return nn.functional.linear(self.norm(x), self.token.weight)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of predicting each next token of ``windows`` (B, S + 1)."""
        logits = self(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())

    @torch.no_grad()
    def generate(
        self, ids: Tensor, count: int, generator: torch.Generator, *, temperature: float, top_k: int
    ) -> Tensor:
        """Continue ``ids`` (B, S) by ``count`` tokens.

        Args:
            ids: int64 (B, S).
            count: how many tokens to add.
            generator: on the CPU; the same one gives the same text.
            temperature: divides the logits; below 1 keeps closer to the likeliest token.
            top_k: draw from this many likeliest tokens.

        Returns:
            int64 (B, S + count).
        """
        for _ in range(count):
            likeliest = self(ids[:, -self.config.context :])[:, -1].float().topk(min(top_k, self.config.vocab))
            weights = torch.softmax(likeliest.values / temperature, -1).cpu()
            drawn = torch.multinomial(weights, 1, generator=generator).to(ids.device)
            ids = torch.cat([ids, likeliest.indices.gather(1, drawn)], 1)
        return ids
