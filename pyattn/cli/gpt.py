"""A GPT to train: GPT-2's block, with the attention as an argument.

::

    x = token[ids] + position                                    (B, S, width); with ALiBi, token[ids]
    x = x + project(attend(q, k, v)),  q k v = qkv(norm(x))      q, k, v (B, heads, S, width / heads)
    x = x + down(gelu(up(norm(x))))                              4 width inside; both lines `layers` times
    logits = norm(x) token^T                                     (B, S, vocab)

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", and the code released with it.
Windows, ALiBi and sinks let a model read past its training length: see :func:`pyattn.attention`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import pyattn
from pyattn import reference
from pyattn.cli.checks import InputError, check_integer, check_share, check_window
from pyattn.nn.rotary import alibi_slopes
from pyattn.options import UNBOUNDED

Attend = Callable[..., Tensor]
"""Causal attention: q, k, v (B, heads, S, head_dim) and dropout_p to out, shaped like q; also window, alibi_slopes and
sinks by name, if the model has them."""


def attend_pyattn(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
    """The native kernels."""
    out: Tensor = pyattn.attention(q, k, v, dropout_p=dropout_p, **options)
    return out


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """PyTorch's own attention, which has no windows, ALiBi or sinks."""
    return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, **options: Any) -> Tensor:
    """The formula in plain PyTorch."""
    return cast(Tensor, reference.attention(q, k, v, dropout_p=dropout_p, **options))


Layers = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
"""Applies layers, which map each token's features alone, to ``x`` (B, S, features)."""


def all_tokens(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In one call."""
    return layers(x)


def token_by_token(layers: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A call for each token, whose bits are then those of a call of one token: torch's products over one row and over
    several differ by rounding. A call of one token reads its own memory, so here each token is copied."""
    return torch.cat([layers(token.clone()) for token in x.split(1, 1)], 1)


Drop = Callable[[Tensor, float, bool], Tensor]
"""``torch.nn.functional.dropout``: an input, the probability of dropping an element, whether to drop any."""

ATTENTIONS: dict[str, Attend] = {"pyattn": attend_pyattn, "sdpa": attend_sdpa, "reference": attend_reference}


@dataclass(frozen=True)
class Config:
    """The configuration of a GPT; a checkpoint stores it as JSON.

    Attributes:
        layers: number of blocks.
        heads: attention heads in each block; divides ``width``.
        width: features of a token.
        context: most tokens the model can see.
        vocab: number of distinct tokens; 256 for bytes.
        dropout: probability of dropping an embedding, an attention weight or a block's output while training.
        window: (left, right), how many tokens a token sees before and after its own position, -1: all; the model is
            always causal, so right has no effect.
        sinks: whether each head's softmax has a learned sink.
        alibi: ALiBi's biases in place of learned positions, so text may be longer than ``context``.
    """

    layers: int = 2
    heads: int = 4
    width: int = 128
    context: int = 256
    vocab: int = 256
    dropout: float = 0.0
    window: tuple[int, int] = UNBOUNDED
    sinks: bool = False
    alibi: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocab"):
            check_integer(name, getattr(self, name), 1)
        if self.width % self.heads:
            raise InputError("width must be a multiple of heads", f"{self.width} and {self.heads}")
        check_share("dropout", self.dropout)
        check_window("window", self.window)

    @property
    def weights(self) -> int:
        """The number of elements of the model's matrices, a lower bound on its size."""
        tokens = self.vocab + (0 if self.alibi else self.context)
        return self.width * (tokens + 12 * self.width * self.layers)


class Block(nn.Module):
    """Attention, then an MLP, each with pre-normalisation and a residual connection."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads: int = config.heads
        self.dropout: float = config.dropout
        self.attention_norm: nn.LayerNorm = nn.LayerNorm(config.width)
        self.qkv: nn.Linear = nn.Linear(config.width, 3 * config.width)
        self.project: nn.Linear = nn.Linear(config.width, config.width)
        self.mlp_norm: nn.LayerNorm = nn.LayerNorm(config.width)
        self.up: nn.Linear = nn.Linear(config.width, 4 * config.width)
        self.down: nn.Linear = nn.Linear(4 * config.width, config.width)
        self.window: tuple[int, int] = config.window
        self.sinks: nn.Parameter | None = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        self.register_buffer("slopes", alibi_slopes(config.heads) if config.alibi else None, persistent=False)

    def options(self) -> dict[str, Any]:
        """Attention's arguments besides q, k, v and dropout; none in GPT-2."""
        window = None if self.window == UNBOUNDED else self.window
        options = {"window": window, "alibi_slopes": self.slopes, "sinks": self.sinks}
        return {name: value for name, value in options.items() if value is not None}

    def forward(self, x: Tensor, attend: Attend, drop: Drop, layers: Layers = all_tokens) -> Tensor:
        """Maps ``x`` (B, S, width) to the same shape; q, k and v are strided views, so ``attend`` gets no copies."""
        dropout_p = self.dropout if self.training else 0.0
        qkv = layers(lambda x: self.qkv(self.attention_norm(x)), x)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v, dropout_p, **self.options()).transpose(1, 2).flatten(2)
        x = x + drop(layers(self.project, out), dropout_p, self.training)
        return x + drop(layers(self._mlp, x), dropout_p, self.training)

    def _mlp(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return hidden


class GPT(nn.Module):
    """Token ids (B, S) to logits (B, S, vocab); ``attend`` and ``drop`` may be replaced at any time."""

    __call__: Callable[..., Tensor]

    def __init__(self, config: Config, attend: Attend = attend_pyattn) -> None:
        super().__init__()
        self.config = config
        self.attend = attend
        self.drop: Drop = nn.functional.dropout
        self.token: nn.Embedding = nn.Embedding(config.vocab, config.width)
        self.position: nn.Embedding | None = None if config.alibi else nn.Embedding(config.context, config.width)
        self.blocks: nn.ModuleList = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm: nn.LayerNorm = nn.LayerNorm(config.width)
        self.init_weights()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.token.weight.device

    def weights(self) -> dict[str, Tensor]:
        """The weights by their names."""
        return dict(self.state_dict())

    def init_weights(self) -> None:
        """GPT-2's initialisation: std 0.02, over sqrt(2 layers) for projections into the residual stream; biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                joins_stream = name.endswith(("project.weight", "down.weight"))
                sums = 2 * self.config.layers if joins_stream else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(sums))

    def forward(
        self,
        ids: Tensor,
        attends: Sequence[Attend] | None = None,
        first: int = 0,
        positions: Tensor | None = None,
        layers: Layers = all_tokens,
    ) -> Tensor:
        """Logits (B, S, vocab) of ``ids``, int64 (B, S), the first of which is at position ``first``.

        Learned positions end at ``config.context``. ``attends`` has an attention for each block in place of the model's
        own; it may know the tokens before ``first``. ``positions`` (S,) replaces ``first`` where ids have gaps.
        ``layers`` applies all layers but attention.
        """
        x = self.token(ids)
        if self.position is not None:
            if positions is None:
                if first + ids.shape[1] > self.config.context:
                    raise InputError(f"tokens must fit the context of {self.config.context}", first + ids.shape[1])
                positions = torch.arange(first, first + ids.shape[1], device=ids.device)
            x = x + self.position(positions)
        x = self.drop(x, self.config.dropout, self.training)
        for block, attend in zip(self.blocks, attends or [self.attend] * len(self.blocks), strict=True):
            x = block(x, attend, self.drop, layers)
        return layers(lambda x: nn.functional.linear(self.norm(x), self.token.weight), x)

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of predicting each next token of ``windows`` (B, S + 1)."""
        logits = self(windows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
