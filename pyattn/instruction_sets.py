"""The instruction set of the CPU that the kernels use; GPUs are not concerned."""

from pyattn import _C
from pyattn.arguments import check_type

__all__ = ["isa", "isas", "set_isa"]


def isas() -> list[str]:
    """The instruction sets that this CPU and this build have, best first; the last one is ``"scalar"``.

    Names: ``"avx512_bf16"``, ``"avx512"`` and ``"avx2"`` on x86, ``"neon"`` on Arm, ``"scalar"`` anywhere.
    """
    return _C.available_isas()


def isa() -> str:
    """The instruction set in use: that of :func:`set_isa`, else of the environment variable PYATTN_ISA, else the best.

    Raises:
        ValueError: PYATTN_ISA names one that is not among :func:`isas`.
    """
    return _C.active_isa()


def set_isa(name: str) -> None:
    """Makes another instruction set the one in use, for all threads of this process, from the next call on.

    Results differ between instruction sets by rounding.

    Args:
        name: one of :func:`isas`.

    Raises:
        ValueError: another name, or another one in the environment variable PYATTN_ISA.
        TypeError: no str.

    >>> pyattn.set_isa("scalar")
    >>> pyattn.isa()
    'scalar'
    >>> pyattn.set_isa(pyattn.isas()[0])
    """
    check_type("name", name, str)
    _C.set_isa(name)
