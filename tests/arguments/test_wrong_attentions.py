"""Promise: the laws notice an attention with one result a hundredth too large, or with any other fault."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from arguments import test_errors
from attention import test_accuracy, test_laws, test_layouts
from masks import test_masks
from options import test_dropout, test_scores
from support.backends import CPU, Backend
from support.cases import Case
from support.yardstick import LEARNED, bound, excess
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from pyattn import attention


@dataclass(frozen=True)
class Faulty(Backend):
    fault: str = ""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **options: Any) -> Any:
        inputs = {"dq": q, "dk": k, "dv": v}
        if self.fault in inputs:
            inputs[self.fault] = gradient_too_large(inputs[self.fault])
        if self.fault in LEARNED.values():
            option = next(name for name, gradient in LEARNED.items() if gradient == self.fault)
            options[option] = gradient_too_large(options[option])
        if self.fault == "mask":
            options["causal"] = False
        if self.fault == "window":
            options["window"] = options["window"][0] + 1, options["window"][1]
        if self.fault == "softcap":
            options["softcap"] *= 1.01
        if self.fault == "seed":
            options["dropout_seed"] //= 2
        out, lse = attention(*inputs.values(), return_lse=True, **options)
        if self.fault == "out":
            out = out * 1.01
        if self.fault == "lse":
            lse = lse * 1.01
        if self.fault == "noise":
            out = out + torch.rand_like(out) / 1000
        return (out, lse) if return_lse else out


def gradient_too_large(x: Tensor) -> Tensor:
    """x, with a gradient a hundredth too large."""
    return x * 1.01 - (x * 0.01).detach()


CASE = {"case": Case(1, 3, 3, 57, 57, 20, 20, causal=False, softmax_scale=-0.3), "dtype": torch.float32}
TINY = CASE | {"case": Case(1, 2, 2, 20, 120, 8, 8, softmax_scale=1e-30)}
FLOAT = {"dtype": torch.float32}
WINDOW = FLOAT | {"case": Case(2, 2, 1, 36, 70, 21, 19, window=(11, -1))}
WORDS: dict[str, Any] = {"softcap": 2.0, "bias": "float hk", "alibi": "bh", "sinks": True, "relative": "h 9"}
SCORES = FLOAT | {"case": Case(2, 4, 2, 40, 50, 8, 8, **WORDS)}


@pytest.mark.parametrize(
    ("fault", "law", "arguments"),
    [
        ("", test_accuracy.test_forward_and_backward, CASE),
        *((fault, test_accuracy.test_forward_and_backward, CASE) for fault in ("out", "lse", "dq", "dk", "dv")),
        *((fault, test_accuracy.test_forward_and_backward, TINY) for fault in ("", "dq", "dk")),
        ("dq", test_laws.test_gradients_are_differences, {"case": Case(1, 2, 1, 4, 5, 3, 2)}),
        ("", test_scores.test_forward_and_backward, SCORES),
        *((fault, test_scores.test_forward_and_backward, SCORES) for fault in (*LEARNED.values(), "softcap")),
        ("window", test_masks.test_forward_and_backward, WINDOW),
        ("window", test_masks.test_what_is_hidden_changes_no_bit, WINDOW),
        ("mask", test_laws.test_what_is_not_seen_changes_no_bit, FLOAT | {"bad": 7.0}),
        ("mask", test_laws.test_rows_that_see_nothing, FLOAT | {"case": Case(1, 2, 1, 80, 50, 16, 16, q_offset=-70)}),
        ("mask", test_laws.test_nan_that_is_seen_arrives, FLOAT | {"causal": True}),
        ("noise", test_laws.test_what_is_not_seen_changes_no_bit, FLOAT | {"bad": 7.0}),
        ("noise", test_layouts.test_layout_of_rows_changes_no_bit, FLOAT | {"layout": test_layouts.nan_padded}),
        ("seed", test_dropout.test_native_mask_is_the_one_shown, FLOAT | {"seed": 9}),
    ],
)
def test_a_law_notices(fault: str, law: Callable[..., None], arguments: dict[str, Any]) -> None:
    backend = Faulty(CPU[0].name, "cpu", fault=fault)
    call = {next(iter(law.__annotations__)): backend} | arguments
    if fault:
        with pytest.raises((AssertionError, GradcheckError)):
            law(**call)
    else:
        law(**call)


@pytest.mark.parametrize("plain", [torch.inf, torch.nan])
def test_a_plain_result_that_is_not_finite_allows_nothing(plain: float) -> None:
    x, exact = torch.tensor([1.0, 2.0], dtype=torch.float16), torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert excess(x, [bound(x.dtype, torch.tensor([1.0, plain], dtype=torch.float16), exact)], exact) == torch.inf


def test_what_is_not_refused_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_errors, "attention", lambda **_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_errors.test_forward("cpu", *test_errors.BAD_INPUTS[0])
