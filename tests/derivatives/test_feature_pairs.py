"""Promise: gradients in float64 equal differences, for every pair of features and every differentiable input."""

import pytest
from backends import Backend
from derivatives.calls import FEATURES, PAIRS, Call
from torch.autograd import gradcheck


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_gradients_are_differences(repeatable: Backend, a: str, b: str) -> None:
    call = Call(FEATURES[a] | FEATURES[b])
    assert gradcheck(lambda *x: call(repeatable.attention, *x), call.leaves, fast_mode=True)
