"""The CPU instruction set that the kernels use; it has no effect on a GPU."""

from pyattn import _C
from pyattn.options.checks import check_type

__all__ = ["isa", "isas", "set_isa"]

BFLOAT16_PRODUCTS = ("amx", "avx512_bf16")
"""Instruction sets that multiply bfloat16, and have kernels for it alone; others first convert it to float32."""


def isas() -> list[str]:
    """The instruction sets that both this CPU and this build have, best first; the last one is ``"scalar"``.

    Names: ``"amx"``, ``"avx512_bf16"``, ``"avx512"`` and ``"avx2"`` on x86, ``"neon"`` on Arm, ``"scalar"`` anywhere.
    AVX512_BF16 comes before AVX-512 on AMD's processors and after it on Intel's, which multiply float32 faster.
    """
    return _C.available_isas()


def isa() -> str:
    """The instruction set in use: that of :func:`set_isa`, else of the environment variable PYATTN_ISA, else the best.

    Raises:
        ValueError: PYATTN_ISA names one that is not among :func:`isas`.
    """
    return _C.active_isa()


def set_isa(name: str) -> None:
    """Selects the instruction set for all threads of this process, from the next call on.

    Results differ between instruction sets by rounding.

    Args:
        name: one of :func:`isas`.

    Raises:
        ValueError: a name, here or in the environment variable PYATTN_ISA, that is not among :func:`isas`.
        TypeError: a name that is not a str.

    >>> pyattn.set_isa("scalar")
    >>> pyattn.isa()
    'scalar'
    >>> pyattn.set_isa(pyattn.isas()[0])
    """
    check_type("name", name, str)
    _C.set_isa(name)
