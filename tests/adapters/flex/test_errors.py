"""Promise: the FlexAttention adapter refuses wrong arguments in one sentence with their values."""

import pytest
import torch
from support.assertions import refused
from torch.nn.attention import flex_attention as torch_flex

from pyattn.adapters.flex import (
    AuxRequest,
    alibi,
    and_masks,
    causal,
    create_block_mask,
    document,
    flex_attention,
    or_masks,
    prefix_lm,
    sliding_window,
    softcap,
)

IDS = torch.tensor([0] * 20 + [1] * 30 + [2] * 14)


def blocks(mask_mod, batch=None):
    return create_block_mask(mask_mod, batch, None, 64, 64, device="cpu")


def own_score(score, b, h, q_idx, kv_idx):
    return score * 2


def jagged(x):
    return torch.nested.nested_tensor(list(x.transpose(1, 2)), layout=torch.jagged).transpose(1, 2)


MADE = blocks(causal())
ELSEWHERE = document(torch.zeros(64, dtype=torch.int64, device="meta"))
CALLS = {
    "heads": (ValueError, lambda q, k, v: flex_attention(q, k[:, :1], v[:, :1]), "query and key must have the same n"),
    "dimensions": (ValueError, lambda q, k, v: flex_attention(q[0], k, v), "query, key and value must have 4 dim"),
    "jagged": (
        NotImplementedError,
        lambda *t: flex_attention(*(jagged(x) for x in t), own_score, MADE),
        "query must be a dense tensor, as pyattn.attention computes jagged ones, got a nested tensor of layout torch.j",
    ),
    "jagged keys": (
        NotImplementedError,
        lambda q, k, v: flex_attention(q, jagged(k), jagged(v)),
        "key must be a dense tensor, as pyattn.attention computes jagged ones, got a nested tensor of layout torch.j",
    ),
    "strided nested values": (
        NotImplementedError,
        lambda q, k, v: flex_attention(q, k, torch.nested.nested_tensor(list(v))),
        "value must be a dense tensor, as pyattn.attention computes jagged ones, got a nested tensor of layout torch.",
    ),
    "lengths": (
        ValueError,
        lambda q, k, v: flex_attention(q[:, :, :9], k, v, None, MADE),
        "block_mask must be of shap",
    ),
    "torch's lengths": (
        ValueError,
        lambda q, k, v: flex_attention(q, k, v, None, torch_flex.create_block_mask(causal(), 1, 1, 64, 9, "cpu")),
        "block_mask must be of shape (2, 2, 64, 64), B and H may be 1, got (1, 1, 64, 9)",
    ),
    "batch": (
        ValueError,
        lambda q, k, v: flex_attention(q, k[:1], v[:1], None, MADE),
        "query and key must have the same batch size, or 1 for key and query's for block_mask, got 2, 1 and 1",
    ),
    "sequences": (
        ValueError,
        lambda q, k, v: blocks(document(IDS.expand(3, -1)), 2),
        "B must be 3, the number of sequences of the mask_mod, got 2",
    ),
    "mask": (TypeError, lambda *t: flex_attention(*t, block_mask=IDS), "block_mask must be BlockMask, got "),
    "device": (
        ValueError,
        lambda *t: flex_attention(*t, block_mask=MADE.to("meta")),
        "block_mask must be on query's device cpu, got meta",
    ),
    "pair": (
        ValueError,
        lambda *t: create_block_mask(causal(), 1, 1, 9, 9, "cpu", (8, 8, 8)),
        "BLOCK_SIZE must be an int or a pair of ints, got (8, 8, 8)",
    ),
    "score": (TypeError, lambda *t: flex_attention(*t, 3), "score_mod must be a function, got 3"),
    "max_scores": (
        NotImplementedError,
        lambda *t: flex_attention(*t, return_aux=AuxRequest(max_scores=True)),
        "return_aux must not ask for max_scores on a CPU, got AuxRequest(lse=False, max_scores=True)",
    ),
    "both": (
        ValueError,
        lambda *t: flex_attention(*t, return_lse=True, return_aux=AuxRequest()),
        "return_lse must not be set together with return_aux, got True and AuxRequest(",
    ),
    "aux": (TypeError, lambda *t: flex_attention(*t, return_aux=True), "return_aux must be AuxRequest, got True"),
    "option": (
        ValueError,
        lambda *t: flex_attention(*t, kernel_options={"OUTPUT_MAX": True}),
        "kernel_options must be torch's FlexKernelOptions, got 'OUTPUT_MAX'",
    ),
    "options": (TypeError, lambda *t: flex_attention(*t, kernel_options=3), "kernel_options must be dict, got 3"),
    "list": (TypeError, lambda *t: flex_attention([1.0], *t[1:]), "query must be Tensor, got [1.0]"),
    "scale": (ValueError, lambda *t: flex_attention(*t, scale=float("nan")), "softmax_scale must be finite, got nan"),
    "dtype": (TypeError, lambda q, k, v: flex_attention(q, k.half(), v), "k must have dtype float32, got float16"),
    "more": (
        NotImplementedError,
        lambda *t: create_block_mask(causal(), 1, 1, 64, 64, "cpu", dq_kv_order=True),
        "create_block_mask has no dq_kv_order on a CPU, got {'dq_kv_order': True}",
    ),
    "block": (
        ValueError,
        lambda *t: create_block_mask(causal(), 1, 1, 9, 9, "cpu", 0),
        "each of BLOCK_SIZE must be at",
    ),
    "size": (
        ValueError,
        lambda *t: create_block_mask(causal(), 1, 1, -9, 9, "cpu"),
        "Q_LEN must be at least 0, got -9",
    ),
    "offset": (TypeError, lambda *t: causal(0.5), "offset must be int or Tensor, got 0.5"),
    "offsets": (ValueError, lambda *t: causal(IDS[None]), "offset must have 0 or 1 dimensions, got shape (1, 64)"),
    "window": (
        ValueError,
        lambda *t: sliding_window(-2),
        "window must be (left, right), each at least -1, got [-2, 0]",
    ),
    "ids": (TypeError, lambda *t: document(IDS.float()), "ids must be int32 or int64, got torch.float32"),
    "few ids": (
        ValueError,
        lambda *t: blocks(document(IDS[:60])),
        "ids of document must be as many as queries and keys, 64 and 64, got shape (60,)",
    ),
    "ids elsewhere": (ValueError, lambda *t: blocks(ELSEWHERE), "ids of document must be on query's device cpu, got m"),
    "prefix": (ValueError, lambda *t: prefix_lm(-1), "prefix must be at least 0, got -1"),
    "int mask": (
        TypeError,
        lambda *t: blocks(lambda b, h, i, j: i - j),
        "mask_mod must return a bool tensor, got torch.in",
    ),
    "plain mask": (TypeError, lambda *t: blocks(lambda b, h, i, j: True), "mask_mod must return a tensor, got True"),
    "row mask": (
        ValueError,
        lambda *t: blocks(lambda b, h, i, j: IDS[:3] > i),
        "mask_mod must return one value for a pair, got shape (3,)",
    ),
    "union": (TypeError, lambda *t: or_masks(causal(), 3), "mask_mod must be a function, got 3"),
    "factory": (
        TypeError,
        lambda *t: and_masks(causal),
        "mask_mod must be what causal(...) returns, got the function ca",
    ),
    "plain score": (
        TypeError,
        lambda *t: flex_attention(*t, lambda *_: 3.0),
        "score_mod must return a tensor, got 3.0",
    ),
    "row score": (
        ValueError,
        lambda *t: flex_attention(*t, lambda s, b, h, i, j: s + IDS),
        "score_mod must return one value for a pair, got shape (64,)",
    ),
    "keys": (
        ValueError,
        lambda q, k, v: flex_attention(q, k, v[:, :, 1:], own_score),
        "v must have shape [2, 2, 64, 16]",
    ),
    "infinite": (
        ValueError,
        lambda *t: flex_attention(*t, own_score, scale=float("inf")),
        "softmax_scale must be finite, got inf",
    ),
    "transform": (
        NotImplementedError,
        lambda q, k, v: torch.func.grad(lambda q: flex_attention(q, k, v, own_score).sum())(q),
        "a score_mod of your own must run outside of torch.func's transforms and forward mode, got one",
    ),
    "cap": (ValueError, lambda *t: softcap(0), "cap must be above 0, got 0"),
    "slopes": (ValueError, lambda *t: alibi(torch.ones(())), "slopes must have 1 or 2 dimensions, got shape ()"),
    "int slopes": (TypeError, lambda *t: alibi(IDS), "slopes must be of a floating-point dtype, got torch.int64"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_errors(name):
    error, call, message = CALLS[name]
    with refused(error, message):
        call(*torch.randn(3, 2, 2, 64, 16).unbind())


@pytest.mark.parametrize("mask_mod", [causal(), lambda b, h, i, j: i >= j], ids=["known", "evaluated"])
@pytest.mark.parametrize("name", ["kv_num_blocks", "full_kv_num_blocks", "full_kv_indices"])
def test_blocks_that_change_after_a_call_are_checked_again(mask_mod, name):
    block_mask = create_block_mask(mask_mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    x = torch.randn(1, 1, 64, 8)
    flex_attention(x, x, x, None, block_mask)
    getattr(block_mask, name).zero_()
    with refused(ValueError, "block_mask must list every block that its mask_mod shows"):
        flex_attention(x, x, x, None, block_mask)
