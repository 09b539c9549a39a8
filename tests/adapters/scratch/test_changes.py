"""Changes in place of queries, keys, masks and biases between the two products: results are the plain code's."""

import ctypes
import functools
import math
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pyattn.adapters import scratch

B, H, T, D = 2, 3, 6, 4
INF = math.inf
FUTURE = torch.ones(T, T).triu(1).bool()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("changed", ["queries", "keys", "mask"])
def test_changes_between_the_products(changed, inference):
    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        mask = FUTURE.clone()
        scores = (q @ k.mT).masked_fill(mask, -INF)
        {"queries": q, "keys": k, "mask": mask}[changed].zero_()
        return scores.softmax(-1) @ v

    with torch.inference_mode(inference):
        plain = code()
        with scratch.enabled():
            ours = code()
    assert torch.equal(plain, ours)
    assert scratch.counts() == (0, {"queries, keys or a mask changed in place": 1})


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "ReLU": lambda x: nn.functional.relu(x, True),
    "division": lambda x: x.__ifloordiv__(0.3),
    "an overload": lambda x: torch.ops.aten.mul_.Tensor(x, 2),
    "an argument by name": lambda x: torch.relu_(input=x),
    "an element of a view": lambda x: x.view(-1)[3:7].fill_(9),
    "out": lambda x: torch.mul(x, 2, out=x),
    "several at once": lambda x: torch._foreach_mul_([x], 3),
    "a remainder": lambda x: x.__imod__(0.3),
    "a power": lambda x: x.__ipow__(2),
    "NumPy": lambda x: x.numpy().fill(2),
    "NumPy, through a view": lambda x: x[0].mT.numpy().fill(2),
    "NumPy's own function": lambda x: numpy.asarray(x).fill(2),
    "DLPack": lambda x: torch.from_dlpack(x).fill_(2),
    "a storage": lambda x: x.untyped_storage().fill_(0),
    "a pointer": lambda x: ctypes.memset(x.data_ptr(), 0, x.nbytes),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_queries(name, mode):
    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        scores = q @ k.mT
        CHANGES[name](q)
        return scores.softmax(-1) @ v

    with mode():
        plain = code()
        with scratch.enabled():
            assert torch.equal(code(), plain)
    assert sum(scratch.counts().left.values()) == 1


@pytest.mark.parametrize("share", [lambda x: x.numpy(), lambda x: numpy.asarray(torch.from_dlpack(x))])
@pytest.mark.parametrize("read", ["bias", "queries of another product"])
def test_memory_that_is_handed_out_before_it_is_read(read, share):
    """Arrays that are taken between the two products may change what the scores read after that."""

    def code():
        q, k, v, p = torch.randn(4, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        bias, p = torch.zeros(T, T), p.clone()  # q, k and v share memory
        scores = q @ k.mT
        view = share(bias if read == "bias" else p)
        others = p @ k.mT
        scores = scores + bias
        view += 2
        view[0] = 5
        return scores.softmax(-1) @ v, others.softmax(-1) @ v

    plain = code()
    with scratch.enabled():
        ours = code()
    torch.testing.assert_close(ours, plain)
    assert scratch.counts() == (1, {"memory of queries, keys or a mask is handed out": 1})


OF_MASKS: dict[str, Callable[[Tensor], object]] = {
    "xor": lambda x: x.__ixor__(True),
    "shift to the left": lambda x: x.__ilshift__(1),
    "shift to the right": lambda x: x.__irshift__(1),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OF_MASKS)
def test_changes_of_masks(name, mode):
    """An integer mask changes, and with it a bias that views its bits as floats."""

    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        mask = torch.ones(T, T, dtype=torch.int32).tril() * 2**30
        scores = q @ k.mT + mask.view(torch.float32)
        OF_MASKS[name](mask)
        return scores.softmax(-1) @ v

    with mode():
        plain = code()
        with scratch.enabled():
            assert torch.equal(code(), plain)
    assert scratch.counts().taken == 0


TABLE = torch.arange(T)
CHANGED_BY_OTHERS: dict[str, Callable[[Tensor], object]] = {
    "outs of an overload": lambda x: torch.ops.aten.max.dim_max(
        torch.ones(2, T, D), 0, max=x, max_values=torch.zeros(T, D, dtype=torch.int64)
    ),
    "outs of a packet": lambda x: torch.ops.aten.max(
        torch.ones(2, T, D), 0, max=x, max_values=torch.zeros(T, D, dtype=torch.int64)
    ),
    "an embedding's largest norm": lambda x: functional.embedding(TABLE, x, max_norm=0.1),
    "an embedding module's": lambda x: nn.Embedding.from_pretrained(x, max_norm=0.1)(TABLE),
    "a bag's": lambda x: functional.embedding_bag(TABLE[None], x, max_norm=0.1),
    "running means": lambda x: functional.batch_norm(
        torch.ones(2, T * D), x.view(-1), torch.ones(T * D), training=True
    ),
    "running means of torch's": lambda x: torch.batch_norm(
        torch.ones(2, T * D), None, None, x.view(-1), torch.ones(T * D), True, 0.1, 1e-5, False
    ),
    "running means of instances": lambda x: functional.instance_norm(
        torch.ones(1, T * D, 3), x.view(-1), torch.ones(T * D), use_input_stats=True
    ),
    "an operator of one's own": lambda x: DOUBLE(x),
    "its packet": lambda x: torch.ops.pyattn_tests.double(torch.ones(1), x),
}


@torch.library.custom_op("pyattn_tests::double", mutates_args=("x",))
def _double(first: Tensor, x: Tensor) -> None:
    x.mul_(2)


DOUBLE = functools.partial(_double, torch.ones(1))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CHANGED_BY_OTHERS)
def test_changes_by_functions_that_are_not_named_so(name, mode):
    """Queries change by functions that seem to read them alone."""

    def code():
        q, k, v = torch.randn(3, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        scores = q @ k.mT
        CHANGED_BY_OTHERS[name](q)
        return scores.softmax(-1) @ v

    with mode():
        plain = code()
        with scratch.enabled():
            assert torch.equal(code(), plain)
    assert scratch.counts().taken == 0


BY_SCORES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "copy_": lambda x, scores: x.copy_(scores),
    "augmented": lambda x, scores: x.__iadd__(scores),
    "an item": lambda x, scores: x.__setitem__((0, 0), scores[0, 0]),
    "out": lambda x, scores: torch.mul(scores, 2, out=x),
    "out of a product": lambda x, scores: torch.matmul(x.clone(), x.clone(), out=x),
    "out of a product with scores": lambda x, scores: torch.matmul(scores, scores, out=x),
    "several at once": lambda x, scores: torch._foreach_mul_([x], [scores]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", BY_SCORES)
def test_changes_of_a_bias_by_scores(name, mode):
    """As where each layer adds the scores of the one before."""

    def code():
        q, k, v = torch.randn(3, B, H, T, D, generator=torch.Generator().manual_seed(1)).unbind()
        previous = torch.ones(B, H, T, T).tril()
        scores = q @ k.mT + previous
        BY_SCORES[name](previous, scores)
        return scores.softmax(-1) @ v + previous.sum()

    with mode():
        plain = code()
        with scratch.enabled():
            assert torch.equal(code(), plain)
    assert scratch.counts().taken == 0


def test_changes_of_several_at_once_count():
    """So backward finds that what the product saved has changed."""
    q, k = torch.randn(2, B, H, T, T).unbind()
    k.requires_grad_()
    with scratch.enabled():
        scores = q @ k.mT
        torch._foreach_mul_([q], [scores.detach()])
    with pytest.raises(RuntimeError, match="must not change in place"):
        scores.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["set_", "swap_tensors"])
def test_other_memory_is_refused(name, mode):
    """No mode of torch sees it."""
    with mode(), scratch.enabled():
        q = torch.randn(B, H, T, D)
        hidden = FUTURE.clone()
        scores = (q @ q.mT).masked_fill(hidden, -INF)
        if name == "set_":
            hidden.set_(torch.zeros(T, T).bool())
        else:
            torch.utils.swap_tensors(hidden, torch.zeros(T, T).bool())
        with pytest.raises(RuntimeError, match="must not change in place"):
            scores.softmax(-1) @ q
        del scores
