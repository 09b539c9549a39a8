"""Answers that share prompts: how they are run, judged by the yardstick's rule, and run on emulated kernels."""

from collections.abc import Callable
from typing import Any

import emulated
import torch
from support.backends import Backend
from support.cases import Case, run
from support.yardstick import NAMES, Results, Yardsticks, in_double
from torch import Tensor
from torch.nn.functional import pad

from pyattn import attention_with_prefix, reference
from pyattn.options import Options
from pyattn.options.schema import DEFAULTS

HQ, HKV, SQ, SK, P, D = 4, 2, 4, 5, 6, 2
PROMPTS, ANSWERS = 2, 3
BATCH = PROMPTS * ANSWERS
SIZES = {"b": BATCH, "h": HQ, "g": HKV, "q": SQ, "k": P + SK, "n": 2, "r": 9, "2": 2}


def tensors(prompts: int = PROMPTS, answers: int = ANSWERS, **sizes: int) -> list[Tensor]:
    """q, k, v, prefix_k and prefix_v in float64, of which v has more columns."""
    found = {"heads": HQ, "heads_kv": HKV, "q": SQ, "k": SK, "prefix": P} | sizes
    own = prompts * answers, found["heads_kv"], found["k"]
    shapes = [(prompts * answers, found["heads"], found["q"], D), (*own, D), (*own, D + 1)]
    shapes += [(prompts, found["heads_kv"], found["prefix"], columns) for columns in (D, D + 1)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def repeated(case: Case, answers: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a batch whose answers repeat their prompts, the first ``length`` keys."""
    q, *keys = case.inputs(dtype)
    for t in keys:
        t[:, :, :length] = t[::answers, :, :length].repeat_interleave(answers, 0)
    return q, *keys  # type: ignore[return-value]


def summed(results: Results, answers: int, length: int) -> Results:
    """Results with dk and dv of a prompt summed over its answers, as autograd sums what was repeated."""
    out, lse, dq, *rest = results
    wide = [t.clone() for t in rest[:2]]
    for t in wide:
        prompts = t[:, :, :length].unflatten(0, (-1, answers)).sum(1)
        t[:, :, :length] = prompts.repeat_interleave(answers, 0)
    return out, lse, dq, *wide, *rest[2:]


class SummedYardsticks(Yardsticks):
    """Bounds for gradients of prompts, by plain gradients that are summed over the answers."""

    def __init__(self, exact: Results, answers: int, length: int, *arguments: Any, **options: Any) -> None:
        self._prompts = answers, length
        super().__init__(summed(exact, *self._prompts), *arguments, **options)

    def _bounds(self, plain: Results) -> list[float]:
        return super()._bounds(summed(plain, *self._prompts))


def over_prompts(answers: int, length: int) -> Callable[..., Any]:
    """attention_with_prefix as a function of q, k and v that begin with prompts, whose gradients are the sums."""

    class Prompts(torch.autograd.Function):
        """The prompts among keys; each answer gets the whole gradient, to be compared with :func:`summed`."""

        @staticmethod
        def forward(ctx: Any, keys: Tensor) -> Tensor:
            ctx.own = keys.shape[2] - length
            return keys[::answers, :, :length].clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return pad(gradient.repeat_interleave(answers, 0), (0, 0, 0, ctx.own))

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        prompts = (Prompts.apply(t) for t in (k, v))
        return attention_with_prefix(q, k[:, :, length:], v[:, :, length:], *prompts, **options)

    return attend


def assert_accurate(case: Case, answers: int, length: int, dtype: torch.dtype, **more: Any) -> None:
    """Asserts that every result and gradient is accurate by the rule of yardstick.py."""
    qkv, (dout, dlse) = repeated(case, answers, length, dtype), case.gradients(dtype)
    options = case.given(dtype) | more
    doubles = tuple(t.double() for t in qkv)
    exact = run(reference.attention, doubles, dout.double(), dlse, **in_double(options))  # type: ignore[arg-type]
    yardsticks = SummedYardsticks(exact, answers, length, run, qkv, dout, dlse, **options)
    ours = run(over_prompts(answers, length), qkv, dout, dlse, **options)
    excesses = yardsticks.excesses(ours)
    assert max(excesses.values()) <= 1, excesses
    assert [*excesses][: len(NAMES)] == [*NAMES]


def on_emulated(backend: Backend) -> Callable[[Tensor, Tensor, Tensor, Options], tuple[Tensor, ...]]:
    """The function that computes a part, on emulated kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
        given: dict[str, Any] = {n: x for n, x in options._asdict().items() if x is not DEFAULTS[n]}
        if (offsets := given.pop("q_offsets", None)) is not None:
            given["q_offset"] = offsets
        found: tuple[Tensor, ...] = emulated.attention(
            q, k, v, return_lse=True, deterministic=backend.repeatable, **given
        )
        return found

    return attend


PART = "pyattn.prefix.attention._attend"
"""The function that computes a part."""
