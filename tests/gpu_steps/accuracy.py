"""Every result, forward and backward, by the rule of yardstick.py, reference and truth on the same device.

A check returns, for each tensor, the largest share of its bound that an error reached.
"""

from functools import partial

import torch
from gpu_steps.child import Check
from gpu_steps.common import Offsets, determinism, options_on, tensors
from helpers import DTYPES, NAMES, Case, run
from yardstick import Yardsticks, excess

from pyattn import attention, reference

HEAD_DIMS = (
    *((d, d) for d in (32, 64, 96, 128, 192, 256)),
    *((20, 20), (72, 72), (80, 80), (1, 1), (21, 77), (64, 128), (128, 33), (100, 256), (256, 64)),
)
"""Those that there are kernels for, then some that are filled up, and values of another width."""


def cases(head_dim: int, head_dim_v: int) -> list[tuple[Case, Offsets | None]]:
    """Masks, groups, dropout, and lengths that fill no tile; some with an offset for each sequence."""
    dims = (head_dim, head_dim_v)
    return [
        (Case(2, 4, 2, 130, 197, *dims), None),
        (Case(1, 3, 3, 257, 257, *dims, causal=False, softmax_scale=-0.3), None),
        (Case(2, 4, 1, 200, 129, *dims, q_offset=-30, dropout_p=0.2), None),
        (Case(1, 6, 2, 100, 333, *dims, causal=False, dropout_p=0.5), None),
        (Case(1, 8, 2, 1, 515, *dims), None),
        (Case(2, 2, 1, 65, 300, *dims), (-3, 150)),
    ]


LONG = [Case(1, 4, 2, 1500, 1500, 64, 64), Case(1, 2, 2, 1100, 2300, 128, 128, q_offset=900, dropout_p=0.1)]


def exact_arithmetic() -> None:
    """The yardstick is float32 in float32, and 16-bit products added up in float32."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False


def compare(case: Case, offsets: Offsets | None, dtype: torch.dtype, device: str) -> dict[str, float]:
    """With and without a gradient into lse, deterministic and not."""
    exact_arithmetic()
    qkv, dout, into_lse = tensors(case, dtype, device)
    options = options_on(device, case, offsets)
    shares, wrong = dict.fromkeys(NAMES, 0.0), []
    for dlse in (into_lse, None):
        plain = Yardsticks(run, qkv, dout, dlse, **options)
        wide = tuple(t.double() for t in qkv)
        exact = run(reference.attention, wide, dout.double(), dlse, **options)
        for deterministic in (True, False):
            with determinism(deterministic):
                ours = run(attention, qkv, dout, dlse, **options)
            assert ours[0].dtype == dtype
            for name, x, orders, truth in zip(NAMES, ours, plain, exact, strict=True):
                by = excess(x, orders, truth)
                shares[name] = max(shares[name], round(by, 3))
                if not by <= 1:  # NaN is no more accurate than too large an error
                    how = f"deterministic {deterministic}, dlse {dlse is not None}"
                    wrong.append(f"{name} is off by {by:.3g} times its bound ({how})")
    assert not wrong, "; ".join(wrong)
    return shares


def checks(device: str) -> dict[str, Check]:
    varied = [pair for dims in HEAD_DIMS for pair in cases(*dims)] + [(case, None) for case in LONG]
    return {
        f"{case}{offsets or ''} {dtype}": partial(compare, case, offsets, dtype, device)
        for dtype in DTYPES
        for case, offsets in varied
    }
