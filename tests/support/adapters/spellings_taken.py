"""Spellings of attention that are taken."""

import math

import torch
from support.adapters.spellings import (
    ALL_FUTURE,
    BIAS,
    FUTURE,
    INF,
    LEAST,
    PADDED,
    UNSEEN,
    B,
    Code,
    D,
    H,
    T,
    float_mask,
    folded,
)
from torch import nn
from torch.nn import functional


def in_place(q, k, v):
    scores = q @ k.mT
    scores.masked_fill_(FUTURE, -INF)
    scores /= 2
    return functional.softmax(scores, dim=-1) @ v


def a_mask_made_from_the_scores(q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < scores.topk(3, -1)[0][..., -1:], -INF).softmax(-1) @ v


def in_place_after_an_einsum_of_one_head(q, k, v):
    """longt5's: without sums over heads, einsum's result is a view."""
    scores = torch.einsum("...qhd,...khd->...hqk", *(x[:, :1].transpose(1, 2) for x in (q, k)))
    scores += BIAS[:1]
    return torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v[:, :1].transpose(1, 2))


def assigned(index, value):
    """Scores ``[index] = value``."""

    def code(q, k, v):
        scores = q @ k.mT / 2
        scores[index] = value
        return scores.softmax(-1) @ v

    return code


TAKEN: dict[str, Code] = {
    "book": lambda q, k, v: ((q @ k.transpose(2, 3)).masked_fill(FUTURE, -INF) / D**0.5).softmax(-1) @ v,
    "nanogpt": lambda q, k, v: (
        functional.softmax(
            ((q @ k.transpose(-2, -1)) * (1 / math.sqrt(D))).masked_fill(FUTURE[None, None] == 1, -INF), dim=-1
        )
        @ v
    ),
    "fill of -1e9": lambda q, k, v: (torch.matmul(q, k.mT) / 2).masked_fill(FUTURE, -1e9).softmax(-1) @ v,
    "sum with the least number": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + float_mask(LEAST)).softmax(-1) @ v,
    "sum with -inf": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + float_mask(-INF)).softmax(-1) @ v,
    "sum with -100": lambda q, k, v: (torch.matmul(q, k.mT) / 2 + FUTURE.double() * -100).softmax(-1) @ v,
    "a float mask times -1e4": lambda q, k, v: (
        (torch.matmul(q, k.mT) / 2 + (1 - (~FUTURE).double()) * -10000.0).softmax(-1) @ v
    ),
    "a difference": lambda q, k, v: (torch.matmul(q, k.mT) / 2 - 1e9 * FUTURE.double()).softmax(-1) @ v,
    "opt's and xglm's, every query sees a key": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(LEAST), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
    "a lower bound before a mask": lambda q, k, v: (
        torch.max(q @ k.mT, torch.tensor(-1e9).double()).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "clamp before a mask": lambda q, k, v: (q @ k.mT).clamp(min=-1e9).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "clamp_min of a mask, in place": lambda q, k, v: (
        (q @ k.mT).masked_fill(FUTURE, -INF).clamp_min_(LEAST).softmax(-1) @ v
    ),
    "xlnet's sum with 0": lambda q, k, v: (q @ k.mT + BIAS + 0).softmax(-1) @ v,
    "a fill that overflows in a scale": lambda q, k, v: (
        ((q @ k.mT).masked_fill(FUTURE, LEAST) * 3 + float_mask(LEAST, UNSEEN)).softmax(-1) @ v
    ),
    "two masks": lambda q, k, v: (q @ k.mT).masked_fill(FUTURE, -INF).masked_fill(PADDED, -INF).softmax(-1) @ v,
    "bias": lambda q, k, v: (q @ k.mT * 0.3 + BIAS).softmax(-1) @ v,
    "bias then scale": lambda q, k, v: ((q @ k.mT + BIAS) / 3).softmax(-1) @ v,
    "bias first operand": lambda q, k, v: (BIAS + q @ k.mT).softmax(-1) @ v,
    "times -1": lambda q, k, v: (-(q @ k.mT) + BIAS).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "divided by -2, capped by -5": lambda q, k, v: (
        ((q @ k.mT / -2).tanh() * -5).masked_fill(FUTURE, -1e9).softmax(-1) @ v
    ),
    "softcap": lambda q, k, v: (torch.tanh(q @ k.mT / 5) * 5).masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(~FUTURE, q @ k.mT, -INF).softmax(-1) @ v,
    "where with a tensor first": lambda q, k, v: (
        torch.where(FUTURE, torch.tensor(-1e9, dtype=torch.float64), q @ k.mT).softmax(-1) @ v
    ),
    "where with a number first": lambda q, k, v: torch.where(FUTURE, -INF, q @ k.mT).softmax(-1) @ v,
    "where with 0, then a mask": lambda q, k, v: (
        torch.where(FUTURE, 0.0, q @ k.mT).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "where with a full tensor": lambda q, k, v: (
        torch.where(~FUTURE, q @ k.mT, torch.full((T, T), -INF).double()).softmax(-1) @ v
    ),
    "where with full_like": lambda q, k, v: (
        (lambda s: torch.where(~FUTURE, s, torch.full_like(s, -1e9)))(q @ k.mT).softmax(-1) @ v
    ),
    "where with ones_like first": lambda q, k, v: (
        (lambda s: torch.where(FUTURE, -9e15 * torch.ones_like(s), s))(q @ k.mT).softmax(-1) @ v
    ),
    "a bias of zeros_like": lambda q, k, v: (
        (lambda s: s + torch.zeros_like(s).masked_fill(FUTURE, -INF))(q @ k.mT + BIAS).softmax(-1) @ v
    ),
    "a bias of new_zeros": lambda q, k, v: (
        (lambda s: s + s.new_zeros(T, T).masked_fill(FUTURE, -INF))(q @ k.mT + BIAS).softmax(-1) @ v
    ),
    "tril then a mask": lambda q, k, v: (q @ k.mT).tril().masked_fill(FUTURE, -INF).softmax(-1) @ v,
    "bmm": lambda q, k, v: torch.bmm(torch.bmm(folded(q), folded(k).mT).softmax(-1), folded(v)).view(B, H, T, D),
    "baddbmm": lambda q, k, v: torch.bmm(
        torch.baddbmm(BIAS.repeat(B, 1, 1), folded(q), folded(k).mT, beta=0.5, alpha=0.25)
        .view(B, H, T, T)
        .masked_fill(FUTURE, -INF)
        .softmax(-1)
        .view(B * H, T, T),
        folded(v),
    ).view(B, H, T, D),
    "folded and unfolded": lambda q, k, v: torch.bmm(
        ((torch.bmm(folded(q), folded(k).mT)).view(B, H, T, T) + BIAS).view(B * H, T, T).softmax(-1), folded(v)
    ).view(B, H, T, D),
    "einsum": lambda q, k, v: torch.einsum(
        "bhqk,bhkd->bqhd", (torch.einsum("bhqd,bhkd->bhqk", q, k) / 2).softmax(-1), v
    ),
    "einsum bqhd": lambda q, k, v: torch.einsum(
        "bhqk,bkhd->bqhd",
        (torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)) / 2).softmax(-1),
        v.transpose(1, 2),
    ),
    "einsum swapped": lambda q, k, v: torch.einsum(
        "bkhd,bhqk->bqhd",
        v.transpose(1, 2),
        (torch.einsum("bkhd,bqhd->bhqk", k.transpose(1, 2), q.transpose(1, 2)) / 2).softmax(-1),
    ),
    "einsum of lists": lambda q, k, v: torch.einsum(
        "nhql,nlhd->nqhd",
        [
            torch.einsum("nqhd,nkhd->nhqk", [q.transpose(1, 2), k.transpose(1, 2)])
            .masked_fill(FUTURE == 1, float("-1e20"))
            .softmax(3),
            v.transpose(1, 2),
        ],
    ),
    "einsum without an arrow": lambda q, k, v: torch.einsum(
        "...ij,...jz", torch.einsum("...id, ...jd", q, k).softmax(-1), v
    ),
    "einsum ellipsis": lambda q, k, v: torch.einsum(
        "...ij,...jd->...id", torch.einsum("...id,...jd->...ij", q, k).softmax(-1), v
    ),
    "xlnet": lambda q, k, v: torch.einsum(
        "bnij,jbnd->ibnd",
        torch.einsum("ibnd,jbnd->bnij", q.permute(2, 0, 1, 3), k.permute(2, 0, 1, 3)).softmax(-1),
        v.permute(2, 0, 1, 3),
    ),
    "softmax with a dtype": lambda q, k, v: functional.softmax(q @ k.mT, dim=-1, dtype=torch.float64) @ v,
    "nn.Softmax": lambda q, k, v: nn.Softmax(dim=3)(q @ k.mT) @ v,
    "grouped heads in a fifth dimension": lambda q, k, v: (
        (q.view(B, 1, 3, T, D) @ k[:, :1].unsqueeze(2).mT).softmax(-1) @ v[:, :1].unsqueeze(2)
    ).view(B, H, T, D),
    "one head of keys": lambda q, k, v: (q @ k[:, :1].mT).masked_fill(PADDED, -INF).softmax(-1) @ v[:, :1],
    "two dimensions": lambda q, k, v: (q[0, 0] @ k[0, 0].T / 2).softmax(-1) @ v[0, 0],
    "three dimensions": lambda q, k, v: (q[0] @ k[0].mT / 2).softmax(-1) @ v[0],
    "repeat_interleave": lambda q, k, v: (
        (q @ k[:, :1].repeat_interleave(3, 1).mT).softmax(-1) @ v[:, :1].repeat_interleave(3, 1)
    ),
    "a temperature of each head": lambda q, k, v: (q @ k.mT * BIAS[:, :1, :1].exp()).softmax(-1) @ v,
    "divided by a temperature of each head": lambda q, k, v: (q @ k.mT / BIAS[:, :1, :1].exp()).softmax(-1) @ v,
    "divided by a learned temperature": lambda q, k, v: (
        (q @ k.mT / BIAS[0, 0, 0].exp()).masked_fill(FUTURE, -INF).softmax(-1) @ v
    ),
    "divided by a tensor of an integer": lambda q, k, v: (q @ k.mT / torch.tensor(3)).softmax(-1) @ v,
    "divided by a tensor": lambda q, k, v: (q @ k.mT / torch.tensor(D).double().sqrt()).softmax(-1) @ v,
    "divided in place": lambda q, k, v: (q @ k.mT).div_(torch.full((1,), 3.0).double()).softmax(-1) @ v,
    "a learned temperature": lambda q, k, v: (q @ k.mT * BIAS[0, 0, 0].exp()).softmax(-1) @ v,
    "weights used twice": lambda q, k, v: (lambda w: w @ v + w.mean() * 3)((q @ k.mT).softmax(-1)),
    "weights used before": lambda q, k, v: (lambda w: w.pow(2).sum() + (w @ v))((q @ k.mT).softmax(-1)),
    "weights printed": lambda q, k, v: (lambda w: (str(w), w @ v)[1])((q @ k.mT).softmax(-1)),
    "a row of least numbers": lambda q, k, v: (q @ k.mT + float_mask(LEAST, ALL_FUTURE)).softmax(-1) @ v,
    "shifted windows": lambda q, k, v: (
        (
            ((q @ k.mT + BIAS).view(1, B, H, T, T) + torch.stack([float_mask(-100.0), float_mask(0.0)])[None, :, None])
            .view(-1, H, T, T)
            .softmax(-1)
        )
        @ v
    ),
    "a fill and a sum of least numbers": lambda q, k, v: (
        ((q @ k.mT).masked_fill(FUTURE, LEAST) + float_mask(LEAST, UNSEEN)).softmax(-1) @ v
    ),
    "the first gpt's": lambda q, k, v: (
        ((q @ k.mT) * (~FUTURE).double() - 1e4 * (1 - (~FUTURE).double())).softmax(-1) @ v
    ),
    "a row of -1e9": lambda q, k, v: (q @ k.mT).masked_fill(ALL_FUTURE, -1e9).softmax(-1) @ v,
    "rows of -1e4, heads repeated": lambda q, k, v: (
        (q @ k[:, :1].repeat_interleave(3, 1).mT).masked_fill(FUTURE, -1e4).masked_fill(UNSEEN, -1e4).softmax(-1)
        @ v[:, :1].repeat_interleave(3, 1)
    ),
    "rows filled with least numbers": lambda q, k, v: (q @ k.mT + BIAS).masked_fill(UNSEEN, LEAST).softmax(-1) @ v,
    "rows of the least number, divided": lambda q, k, v: (
        ((q @ k[:, :1].mT).masked_fill(UNSEEN, LEAST) / 2).softmax(-1) @ v[:, :1]
    ),
    "weights filled with 0": lambda q, k, v: (
        (q @ k.mT).masked_fill(UNSEEN, LEAST).softmax(-1).masked_fill(UNSEEN, 0) @ v
    ),
    "values from the left, as in VQGAN": lambda q, k, v: torch.bmm(
        folded(v).mT.contiguous(), torch.bmm(folded(q), folded(k).mT).softmax(2).permute(0, 2, 1)
    ),
    "values from the left, as in SAGAN": lambda q, k, v: (
        v.mT @ (q @ k.mT + BIAS).masked_fill(FUTURE, -INF).softmax(-1).transpose(2, 3)
    ),
    "values from the left, one head of keys": lambda q, k, v: v[:, :1].mT @ (q @ k[:, :1].mT).softmax(-1).mT,
    "values from the left by einsum": lambda q, k, v: torch.einsum(
        "...dk,...kq->...qd", v.mT, (q @ k.mT).softmax(-1).mT
    ),
    "values from the left in two dimensions": lambda q, k, v: v[0, 0].T @ (q[0, 0] @ k[0, 0].T).softmax(-1).t(),
    "transposed twice": lambda q, k, v: (q @ k.mT).softmax(-1).mT.mT @ v,
    "bmm by names": lambda q, k, v: torch.bmm(
        torch.baddbmm(batch1=folded(q), batch2=folded(k).mT, input=BIAS.repeat(B, 1, 1)).softmax(-1), mat2=folded(v)
    ).view(B, H, T, D),
    "dropout in evaluation": lambda q, k, v: functional.dropout((q @ k.mT).softmax(-1), 0.3, training=False) @ v,
}

TAKEN |= {"in place after an einsum of one head": in_place_after_an_einsum_of_one_head}
TAKEN |= {"in place": in_place, "a mask made from the scores": a_mask_made_from_the_scores}

TAKEN |= {
    "an index of all scores": assigned(FUTURE.expand(B, H, T, T), -INF),
    "an index of queries and keys": assigned((slice(None), slice(None), FUTURE), -1e9),
    "an index after an ellipsis": assigned((..., FUTURE), torch.tensor(-INF, dtype=torch.float64)),
    "an index of keys": assigned((..., FUTURE[2]), torch.full((1,), -1e9, dtype=torch.float64)),
    "an index of heads and queries": assigned((slice(None), FUTURE[:H]), -1e9),
    "an index of sequences": assigned(torch.tensor([False, True]), -1e9),
    "an index after a mask": lambda q, k, v: (
        torch.index_put(
            (q @ k.mT).masked_fill(FUTURE, -1e9), (FUTURE.expand(B, H, T, T),), torch.tensor(-INF).double()
        ).softmax(-1)
        @ v
    ),
    "an index of weights": lambda q, k, v: (
        torch.index_put(
            (q @ k.mT).masked_fill(UNSEEN, LEAST).softmax(-1), (UNSEEN.expand(B, H, T, T),), torch.tensor(0.0).double()
        )
        @ v
    ),
}

WITHOUT_GRADIENTS: dict[str, Code] = {
    "opt's and xglm's": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(LEAST, UNSEEN), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
    "clamped rows without keys": lambda q, k, v: (q @ k.mT + float_mask(LEAST, UNSEEN)).clamp(LEAST).softmax(-1) @ v,
    "the least number instead of -inf": lambda q, k, v: (
        torch.max(q @ k.mT + float_mask(-INF, UNSEEN), torch.tensor(LEAST, dtype=torch.float64)).softmax(-1) @ v
    ),
}
"""Queries that see no key: taken in inference, left if gradients are wanted, which fills and sums have others of."""
