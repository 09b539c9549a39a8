"""score_mods as users of FlexAttention write them, with what they learn, and the plain formula of attention."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from support.adapters.any_masks import HOLES, LENGTH, PIECES, SEVERAL, WIDTH, neighbourhood
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.functional import embedding, logsigmoid, silu
from torch.overrides import TorchFunctionMode

from pyattn.adapters.flex import causal, create_block_mask, document, flex_attention, sliding_window

HEADS = 4


class Scored(NamedTuple):
    """``make(*tensors)`` returns the score_mod, for tensors of these ``shapes``; ``mask`` None: none."""

    make: Callable[..., Callable[..., torch.Tensor]]
    shapes: tuple[tuple[int, ...], ...] = ()
    mask: Callable[..., torch.Tensor] | None = None


def relative(table):
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (kv_idx - q_idx).clamp(-9, 9) + 9]


def t5(table):
    def bucket(distance):
        near, far = distance.clamp(0, 15), 8 + (distance.clamp(min=8) / 8).log2().clamp(max=3) * 2
        return torch.where(distance < 8, near, far.long())

    return lambda score, b, h, q_idx, kv_idx: score + embedding(bucket((q_idx - kv_idx).abs()), table)[h]


def decay(rates):
    return lambda score, b, h, q_idx, kv_idx: score - rates[h].exp() * torch.log1p((q_idx - kv_idx).abs())


def forgetting(gates):
    """The Forgetting Transformer: sums of log gates, computed outside of the score_mod."""
    sums = logsigmoid(gates).cumsum(-1)
    return lambda score, b, h, q_idx, kv_idx: score + sums[b, h, q_idx] - sums[b, h, kv_idx]


def network(first, second):
    """An MLP of the distance."""

    def score_mod(score, b, h, q_idx, kv_idx):
        distance = ((q_idx - kv_idx) / LENGTH).to(score.dtype)
        return score + (torch.tanh(distance * first.to(score.dtype)) * second[h]).sum()

    return score_mod


def two_dimensions(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        x, y = q_idx % WIDTH - kv_idx % WIDTH, q_idx // WIDTH - kv_idx // WIDTH
        return score + table[h, x.clamp(-2, 2) + 2, y.clamp(-1, 1) + 1]

    return score_mod


def scaled(score, b, h, q_idx, kv_idx, *, scales):
    return score * scales[h]


class Module(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, score, b, h, q_idx, kv_idx):
        return silu(score * self.weight[h] + self.bias)


def hides(mask_mod, but=-float("inf")):
    return lambda score, b, h, q_idx, kv_idx: torch.where(mask_mod(b, h, q_idx, kv_idx), score, but)


SCORES = {
    "nothing": Scored(lambda: lambda score, b, h, q_idx, kv_idx: score),
    "causal": Scored(lambda: hides(causal())),
    "a window": Scored(lambda: hides(sliding_window(7)), mask=causal()),
    "dilated": Scored(lambda: hides(HOLES["dilated"])),
    "rows that see nothing": Scored(lambda: hides(lambda b, h, q_idx, kv_idx: (q_idx % 5 > 0) & (q_idx > 20))),
    "soft cap": Scored(lambda: lambda score, b, h, q_idx, kv_idx: 2 * torch.tanh(score / 2), mask=causal()),
    "a constant": Scored(lambda: lambda score, b, h, q_idx, kv_idx: (kv_idx - q_idx) / 64),
    "a square": Scored(lambda: lambda score, b, h, q_idx, kv_idx: score + score.square() / 4),
    "checkerboard": Scored(lambda: hides(HOLES["checkerboard"], but=-1.0)),
    "documents": Scored(lambda: hides(document(PIECES)), mask=lambda b, h, q_idx, kv_idx: kv_idx < 50 + 10 * b),
    "heads": Scored(lambda: lambda score, b, h, q_idx, kv_idx: torch.where(h % 2 == 0, score, score / 2)),
    "alibi": Scored(
        lambda m: lambda score, b, h, q_idx, kv_idx: score + m[h] * (kv_idx - q_idx), ((HEADS,),), causal()
    ),
    "relative": Scored(relative, ((HEADS, 19),), causal()),
    "t5": Scored(t5, ((16, HEADS),)),
    "decay": Scored(decay, ((HEADS,),), causal()),
    "forgetting": Scored(forgetting, ((2, HEADS, LENGTH),), causal()),
    "gates": Scored(
        lambda w: lambda score, b, h, q_idx, kv_idx: score + logsigmoid(w[b, h, kv_idx]), ((2, HEADS, LENGTH),)
    ),
    "a bias": Scored(
        lambda w: lambda score, b, h, q_idx, kv_idx: score + w[h, q_idx, kv_idx], ((HEADS, LENGTH, LENGTH),)
    ),
    "a temperature": Scored(lambda t: lambda score, b, h, q_idx, kv_idx: score * t, ((),), HOLES["tree"]),
    "temperatures": Scored(
        lambda t: lambda score, b, h, q_idx, kv_idx: score * t[b], ((2,),), SEVERAL["rows of documents"]
    ),
    "partial": Scored(lambda w: functools.partial(scaled, scales=w), ((HEADS,),), HOLES["reaches of heads"]),
    "a module": Scored(Module, ((HEADS,), ()), causal()),
    "a network": Scored(network, ((8,), (HEADS, 8)), sliding_window(20, 20)),
    "positions": Scored(
        lambda x, y: lambda score, b, h, q_idx, kv_idx: score + (x[q_idx] * y[kv_idx]).sum(), ((LENGTH, 3), (LENGTH, 3))
    ),
    "mixed places": Scored(
        lambda w: lambda score, b, h, q_idx, kv_idx: score + w[(h + kv_idx) % LENGTH, (q_idx - kv_idx).abs()],
        ((LENGTH, LENGTH),),
    ),
    "alibi by document": Scored(
        lambda m: (
            lambda score, b, h, q_idx, kv_idx: torch.where(
                PIECES[q_idx] == PIECES[kv_idx], score - m[h] * (q_idx % 9 - kv_idx % 9).abs(), -torch.inf
            )
        ),
        ((HEADS,),),
        causal(),
    ),
    "a cap, then temperatures": Scored(
        lambda t: lambda score, b, h, q_idx, kv_idx: 3 * torch.tanh(score / 3) * t[h].exp(), ((HEADS,),), HOLES["tree"]
    ),
    "two dimensions": Scored(two_dimensions, ((HEADS, 5, 3),), neighbourhood),
}


class Indexing(TorchFunctionMode):
    """Indexing by tensors alone, under vmap. torch's own way has no second derivatives and takes no rows of tables."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            return torch.ops.aten.index(args[0], [torch.as_tensor(x) for x in places])
        return func(*args, **kwargs or {})


def by_formula(q, k, v, score_mod, mask_mod=None):
    """out and lse, with all scores at once: torch's formula for tensors on a CPU, with gradients."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT / q.shape[3] ** 0.5
    places = [torch.arange(n) for n in scores.shape]
    with Indexing():
        scores = torch_flex._vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places).to(wide)
        if mask_mod is not None:
            scores = torch.where(torch_flex._vmap_for_bhqkv(mask_mod, prefix=())(*places), scores, -torch.inf)
    lse, unseen = scores.logsumexp(-1), (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
    return weights.to(v.dtype) @ v, lse


def drawn(name, dtype=torch.float64):
    """query, key, value and the learned tensors."""
    shapes = *((2, heads, LENGTH, 8) for heads in (HEADS, 2, 2)), *SCORES[name].shapes
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def functions(name):
    """Our function and the formula, both of query, key, value and the learned tensors."""
    make, _, mask_mod = SCORES[name]
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, 2, HEADS, LENGTH, LENGTH, "cpu", 16)

    def native(q, k, v, *learned):
        return flex_attention(q, k, v, make(*learned), block_mask, enable_gqa=True, return_lse=True)

    def plain(q, k, v, *learned):
        return by_formula(q, k, v, make(*learned), mask_mod)

    return native, plain


def derivatives(function, tensors):
    """out and lse, first derivatives of all tensors, and second ones along one direction."""
    out, lse = function(*tensors)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    loss = (out * torch.arange(out.numel()).reshape(out.shape).sin()).sum() + (finite * finite.detach().cos()).sum()
    first = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
    along = sum((g * torch.arange(g.numel()).reshape(g.shape).cos()).sum() for g in first if g.requires_grad)
    second = torch.autograd.grad(along, tensors, materialize_grads=True)
    return out, lse, *first, *second
