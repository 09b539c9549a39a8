"""Inputs for the tests of the function and of the switch, and torch's results."""

import math
import random

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def tensors(dtype=torch.float64):
    return [torch.randn(2, 4, 6, 8, dtype=dtype, requires_grad=True) for _ in range(3)]


def detached(dtype=torch.float64):
    return [t.detach() for t in tensors(dtype)]


def by_torch(*arguments, **named):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(*arguments, **named)


def by_formula(query, key, value, mask, is_causal, scale, enable_gqa):
    """torch's CPU kernel as torch operations: the math backend takes no mask with is_causal."""
    rows, columns = query.shape[-2], key.shape[-2]
    visible = torch.ones(rows, columns, dtype=torch.bool).tril() if is_causal else torch.ones(()).bool()
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.masked_fill(~visible, -math.inf)
    else:
        bias = torch.zeros((), dtype=query.dtype).masked_fill(~(visible if mask is None else visible & mask), -math.inf)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return by_torch(query * scale, key, value, bias, scale=1.0, enable_gqa=enable_gqa)


def random_case(seed):
    """Tensors in float64 and options, of 2 to 6 dimensions: broadcast, grouped, masked, causal or none of these."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def drawn(*sizes):
        return torch.randn(*sizes, dtype=torch.float64, generator=generator)

    lead = [draw.choice([1, 2, 3]) for _ in range(draw.randint(0, 4))]
    grouped = bool(lead) and draw.random() < 0.3
    heads = draw.choice([1, 2])

    def broadcast_from(sizes, first):
        return [n if draw.random() < 0.7 else 1 for n in sizes][first:]

    def leading(own_heads):
        if grouped:
            return [*broadcast_from(lead[:-1], 0), own_heads]
        return broadcast_from(lead, draw.choice([0, 0, draw.randint(0, len(lead))]))

    seqlen_q, seqlen_k, head_dim, head_dim_v = (draw.randint(1, 5) for _ in range(4))
    q_lead, k_lead, v_lead = leading(heads * draw.choice([1, 2, 3])), leading(heads), leading(heads)
    q, k = drawn(*q_lead, seqlen_q, head_dim), drawn(*k_lead, seqlen_k, head_dim)
    v, mask = drawn(*v_lead, seqlen_k, head_dim_v), None
    kind = draw.choice(["none", "causal", "bool", "float"])
    if kind in ("bool", "float"):
        own = q_lead[-1:] if grouped else []
        scores = torch.broadcast_shapes(q_lead[: len(q_lead) - len(own)], k_lead[: len(k_lead) - len(own)])
        sizes = (*scores, *own, seqlen_q, seqlen_k)
        mask = drawn(broadcast_from(sizes, draw.randint(0, len(sizes))))
        mask = mask > 0 if kind == "bool" else mask.masked_fill(drawn(mask.shape) < -0.5, -math.inf)
    return (q, k, v, mask), {"is_causal": kind == "causal", "scale": draw.choice([None, 0.3]), "enable_gqa": grouped}
