"""Promise: jagged nested tensors that attention does not take are refused in one sentence."""

from typing import Any

import pytest
import torch
from support.assertions import refused
from support.jagged import LENGTHS, drawn
from torch import nn

from pyattn import attention, attention_weights
from pyattn.masks import documents

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Q, K, V = drawn(dtype=torch.float32)
OTHER = drawn((3, 16, 1, 5), dtype=torch.float32)[1]
STRIDED = [torch.randn(2, n, 8) for n in LENGTHS]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"k": torch.randn(4, 2, 17, 8)},
            TypeError,
            "k must be a nested tensor of layout torch.jagged like q, got a ",
        ),
        ({"q": torch.randn(4, 2, 17, 8)}, NotImplementedError, "k must be a dense tensor, got a nested one"),
        ({"v": None}, TypeError, "v must be Tensor, got None"),
        ({"v": OTHER}, ValueError, "v must have the offsets of k, got jagged sizes j"),
        (
            {"k": K.transpose(1, 2)},
            ValueError,
            "k must be (batch, heads, j, head_dim), j its jagged dimension, got",
        ),
        ({"k": drawn((3, 4))[1]}, ValueError, "q and k must have the same batch, got 4 and 2"),
        ({"mask": torch.ones(5).bool()}, NotImplementedError, "packed sequences take no mask"),
        ({"bias": torch.ones(5)}, NotImplementedError, "packed sequences take no bias"),
        ({"mask": Q}, NotImplementedError, "mask must be a dense tensor, got a nested one"),
        (
            {"key_ranges": documents([25])},
            ValueError,
            "key_ranges must have shape (25, 2) or (25, 1 to 4, 2), got [1, 25, 2]",
        ),
        ({"key_ranges": OTHER}, ValueError, "key_ranges must be (batch, j, 2) or (batch, j, n, 2), j"),
        (
            {"key_ranges": torch.nested.nested_tensor_from_jagged(torch.zeros(25, 2).long(), OTHER.offsets())},
            ValueError,
            "key_ranges must have the offsets of q, got jagged sizes j",
        ),
        ({"is_causal": True}, TypeError, "attention has no argument is_causal (use causal"),
    ],
)
def test_errors(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with refused(kind, message):
        attention(**{"q": Q, "k": K, "v": V} | changes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_strided_layout_is_refused() -> None:
    strided = torch.nested.nested_tensor(STRIDED)
    with refused(NotImplementedError, "q must be a dense tensor on the CPU or a CUDA device, got layout Strided (nes"):
        attention(strided, strided, strided)
    with refused(TypeError, "k must be a nested tensor of layout torch.jagged like q, got torch.strided"):
        attention(Q, strided, V)


@pytest.mark.parametrize("call", [nn.MultiheadAttention(16, 4, batch_first=True), nn.TransformerEncoderLayer(16, 4, 8)])
@pytest.mark.parametrize("training", [False, True])
def test_torchs_modules_take_no_jagged_tensors(call: nn.Module, training: bool) -> None:
    """They refuse before they call any attention, as the page says."""
    x = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)], layout=torch.jagged)
    given = (x,) if isinstance(call, nn.TransformerEncoderLayer) else (x, x, x)
    with pytest.raises(AssertionError, match="NestedTensor outside of its fast path"):
        call.train(training)(*given)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.vmap])
def test_transforms_are_refused(transform: Any) -> None:
    """Forward mode stops at torch's own views."""
    q, k, v = drawn()
    calls = [lambda x: attention(x, k, v), lambda x: attention(q, x, v), lambda x: attention(x, x, x)]
    for call in (*calls, lambda x: attention_weights(x, k, reduce="entropy")):
        with refused(NotImplementedError, "nested tensors are not supported in transforms of torch.func, got "):
            transform(call)(k)
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: attention(x, k, v), (q,), (q,))
