"""Promise: modules take jagged nested tensors (B, j, d_in): each sequence gets what it would alone."""

from typing import Any

import pytest
import torch
from support.assertions import Refusals, assert_close, each_refusal, graph_of, refused
from support.modules import (
    ARGUMENTS,
    CONTEXT_LENGTH,
    D_IN,
    WITH_EXTRAS,
    WITH_RANGES,
    assert_same,
    cache_for,
    class_of,
    made,
    sequences,
    set_dropout,
)
from support.packed import starts
from torch import Tensor

from pyattn import attention_varlen, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch's compiler, of a jagged view
]

LENGTHS = 3, 9, 0, 5
CASES = [*((name, "") for name in ARGUMENTS), *((name, "all") for name in WITH_EXTRAS)]


def drawn(columns: int = D_IN) -> Any:
    """(B, j, columns), a leaf."""
    values = torch.randn(sum(LENGTHS), columns, dtype=torch.float64)
    return torch.nested.nested_tensor_from_jagged(values, starts(LENGTHS)).requires_grad_()


def module_of(name: str, extra: str = "") -> torch.nn.Module:
    """In float64; without the keys that MHAPyTorchClass adds to every sequence."""
    arguments = ARGUMENTS[name][:4] if name == "MHAPyTorchClass" else ARGUMENTS[name]
    return made(name, extra) if extra else class_of(name)(*arguments).double()


def without(name: str) -> dict[str, bool]:
    """The argument that turns weights off, where they are the default."""
    return {"need_weights": False} if name == "SingleHeadSelfAttention" else {}


@pytest.mark.parametrize(("name", "extra"), CASES)
def test_forward_and_gradients(name: str, extra: str) -> None:
    """Gradients of x and every parameter, with ranges of each sequence where the module takes them."""
    module, x, ranges = module_of(name, extra), drawn(), None
    if name in WITH_RANGES:
        rows = [torch.randint(n + 1, (n, 2)).sort(-1).values for n in LENGTHS]
        ranges = torch.nested.nested_tensor_from_jagged(torch.cat(rows), x.offsets())
    given = {} if ranges is None else {"key_ranges": ranges}
    out = module(x, **given, **without(name))
    assert out.offsets() is x.offsets()
    values, alone = x.values().split(LENGTHS), []
    for b, part in enumerate(values):
        of_part = {} if ranges is None else {"key_ranges": rows[b][None]}
        alone.append(module(part[None], **of_part, **without(name))[0])
    exact = torch.cat(alone)
    assert_same(out.values(), exact)
    leaves = [x, *module.parameters()]
    grads = [torch.autograd.grad(t.sin().sum(), leaves, materialize_grads=True) for t in (out.values(), exact)]
    assert_close(*([grads_of[0].values(), *grads_of[1:]] for grads_of in grads))


@pytest.mark.parametrize("name", ["MultiHeadAttention", "CausalAttention", "MultiHeadLatentAttention"])
def test_second_derivatives(name: str) -> None:
    """A penalty on the gradient of x, differentiated in every parameter."""
    module, x = module_of(name), drawn()
    results = []
    for out in (module(x).values(), torch.cat([module(t[None])[0] for t in x.values().split(LENGTHS)])):
        (dx,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        penalty = dx.values().square().sum()
        results.append(torch.autograd.grad(penalty, [*module.parameters()], materialize_grads=True))
    assert_close(*results)


def test_dropout() -> None:
    """The draws are those of packed sequences; a probability of 1 drops all."""
    module, x = module_of("MultiHeadAttention"), drawn()
    set_dropout(module, 0.4)
    torch.manual_seed(1)
    out = module(x).values()
    q, k, v = (w(x.values()).unflatten(-1, (2, -1)) for w in (module.W_query, module.W_key, module.W_value))
    torch.manual_seed(1)
    packed = attention_varlen(q, k, v, x.offsets(), x.offsets(), 9, 9, dropout_p=0.4)
    assert_same(out, module.out_proj(packed.flatten(1)))
    set_dropout(module, 1.0)
    assert_same(module(x).values(), module.out_proj(torch.zeros(17, 8, dtype=torch.float64)))


@pytest.mark.parametrize("name", ["MultiHeadAttention", "MultiHeadLatentAttention"])
def test_compiled_and_autocast(name: str) -> None:
    """A graph reads no offsets, so it checks the context's length only if x knows its longest sequence."""
    module, x = module_of(name, "all" if name in WITH_EXTRAS else ""), drawn()
    if name in WITH_EXTRAS:
        x = torch.nested.nested_tensor([*x.values().split(LENGTHS)], layout=torch.jagged)
    losses = (call(x).values().sin().sum() for call in (graph_of(module), module))
    assert_close(*(torch.autograd.grad(loss, [*module.parameters()]) for loss in losses))
    module = module.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.float()).dtype == torch.bfloat16


X = drawn().detach()
COUNTED = torch.arange(17)[None]
ALONE: Refusals = [
    ({"need_weights": True}, NotImplementedError, "need_weights is not supported with a jagged x, got need_weights=Tr"),
    ({"mask": torch.ones(1).bool()}, NotImplementedError, "mask is not supported with a jagged x, got mask=torch.Ten"),
    ({"bias": torch.ones(1)}, NotImplementedError, "bias is not supported with a jagged x, got bias="),
    ({"positions": COUNTED}, NotImplementedError, "positions is not supported with a jagged x, got positions="),
    ({"kv_cache": ...}, NotImplementedError, "kv_cache is not supported with a jagged x, got kv_cache=KVCache("),
]


@each_refusal(ALONE)
@pytest.mark.parametrize("name", [*WITH_EXTRAS, "MultiHeadLatentAttention"])
def test_what_a_jagged_x_comes_without(name, changes, kind, message):
    module = module_of(name)
    given = {"kv_cache": cache_for(module, 4)} if "kv_cache" in changes else changes
    with refused(kind, message):
        module(X, **given)


def test_other_refusals() -> None:
    """Also by modules with one head, by those with several side by side, and where a mask is assigned."""
    alone = "is not supported with a jagged x, got "
    for name in ("CausalAttention", "MultiHeadAttentionWrapper"):
        for wrong in ({"mask": torch.ones(1).bool()}, {"need_weights": True}):
            with refused(NotImplementedError, f"{next(iter(wrong))} {alone}"):
                module_of(name)(X, **wrong)
    with refused(NotImplementedError, f"need_weights {alone}"):
        module_of("SingleHeadSelfAttention")(X)
    with refused(NotImplementedError, f"use_cache {alone}"):
        module_of("GroupedQueryAttention")(X, use_cache=True)
    with refused(NotImplementedError, f"qkv_bias {alone}"):
        class_of("MHAPyTorchClass")(*ARGUMENTS["MHAPyTorchClass"]).double()(X)
    masked = module_of("MultiHeadAttention")
    masked.mask = torch.zeros(CONTEXT_LENGTH, CONTEXT_LENGTH)
    with refused(NotImplementedError, f"mask {alone}"):
        masked(X)
    short = nn.CausalAttention(D_IN, 8, 8, 0.0).double()
    with refused(ValueError, "seqlen must not exceed context_length, got 9 and 8"):
        short(X)
    wide: Tensor = torch.nested.nested_tensor_from_jagged(sequences(1, 17)[0].unflatten(-1, (2, 6)), X.offsets())
    with refused(ValueError, "x must be (batch, j, d_in), j its jagged dimension, got "):
        short(wide)
    with refused(ValueError, "the last dimension of x must be 12, got shape (4, j"):
        short(drawn(11))
    with refused(TypeError, "x must have the dtype of the weights, got torch.float32 and torch.float64"):
        short(X.float())
