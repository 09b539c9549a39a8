"""flash-attn 2's functions on a CPU, forward and backward, in its layout (batch, seqlen, num_heads, head_dim).

The functions have flash-attn's signatures and results. Code that imports flash_attn itself runs
unchanged after :func:`enable`, or within :func:`alias`. These functions also work where flash-attn's
kernels don't: CPUs, float32, head dimensions above 256, softcap with dropout, page sizes that are not
multiples of 256, empty batches. Wrong arguments raise as they do there. Two results follow flash-attn's
documentation rather than its code: softmax_lse with both causal and alibi_slopes, where flash-attn
leaves out a term of each row, and a window at least as long as the keys, which flash-attn drops.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pyattn.adapters.flash_attn import padding, rotary
from pyattn.adapters.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from pyattn.adapters.flash_attn.interfaces import Interfaces
from pyattn.adapters.flash_attn.kv_cache import flash_attn_with_kvcache
from pyattn.adapters.flash_attn.rotary_embedding import RotaryEmbedding
from pyattn.adapters.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

VERSION = "2.8.4+pyattn"
"""The flash-attn version that these functions match; code compares it with the version it needs."""

ROOT = "flash_attn"

__all__ = [
    "alias",
    "disable",
    "enable",
    "enabled",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

INTERFACE: dict[str, Any] = {name: globals()[name] for name in __all__ if name.startswith(ROOT)}

MODULES: dict[str, dict[str, Any]] = {
    ROOT: {**INTERFACE, "__version__": VERSION},
    f"{ROOT}.flash_attn_interface": INTERFACE,
    f"{ROOT}.bert_padding": {name: getattr(padding, name) for name in padding.__all__},
    f"{ROOT}.layers": {},
    f"{ROOT}.layers.rotary": {
        **{name: getattr(rotary, name) for name in rotary.__all__},
        "RotaryEmbedding": RotaryEmbedding,
    },
    f"{ROOT}.ops": {},
    f"{ROOT}.ops.triton": {},
    f"{ROOT}.ops.triton.rotary": {"apply_rotary": rotary.apply_rotary},
}
"""The modules of the alias and their contents; any other module of flash-attn raises ImportError."""

CONTENTS = ", ".join(name for name in MODULES if MODULES[name])
"""The modules that are not empty."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Creates the modules when they are imported."""

    imported = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the alias, or of one that may have an object of its functions.

        ImportError for any other module of flash-attn.
        """
        if fullname in MODULES:
            self.imported = True
            package = any(name.startswith(f"{fullname}.") for name in MODULES)
            return importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=package)
        if fullname.startswith(f"{ROOT}."):
            # No name=: with it, ``from flash_attn import X`` would swallow this error and its reason.
            raise ModuleNotFoundError(f"pyattn: a module of the {ROOT} alias must be one of {CONTENTS}, got {fullname}")
        return _interfaces.watched(fullname, path, target)

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module; flash_attn imports its interface, so code finds it as an attribute."""
        vars(module).update(MODULES[module.__name__])
        if module.__name__ == ROOT:
            importlib.import_module(f"{ROOT}.flash_attn_interface")


_finder = _Finder()
_interfaces = Interfaces(INTERFACE)
_shadowed: dict[str, ModuleType] = {}


def enabled() -> bool:
    """Whether ``import flash_attn`` finds this adapter."""
    return _finder in sys.meta_path


def enable(*, force: bool = False) -> None:
    """Makes ``import flash_attn`` find this adapter, in the whole process, until :func:`disable`.

    The names are flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding, flash_attn.layers.rotary and
    flash_attn.ops.triton.rotary; any other, such as flash_attn.losses, raises ImportError. Names that code has already
    imported keep working after :func:`disable`.

    A program may have an object of these functions in place of the import, as nanochat has in ``flash_attention.py``: a
    ``SimpleNamespace`` named flash_attn with flash_attn_func and flash_attn_with_kvcache. Its functions are replaced by
    these, in modules that are imported already and in any named ``flash_attention`` that are imported later.

    No distribution is installed: transformers looks for one and for a GPU, so it still refuses
    ``attn_implementation="flash_attention_2"``; use :mod:`pyattn.adapters.transformers` there.

    Args:
        force: whether to replace an installed flash-attn.

    Raises:
        RuntimeError: flash-attn is installed or imported, and ``force`` is not given.
    """
    if enabled():
        return
    if not force and (ROOT in sys.modules or importlib.util.find_spec(ROOT) is not None):
        where = getattr(sys.modules.get(ROOT), "__file__", None) or importlib.util.find_spec(ROOT)
        raise RuntimeError(f"pyattn: flash_attn must not be installed, or force=True given, got {where}")
    _shadowed.update(_take_modules())
    sys.meta_path.insert(0, _finder)
    _finder.imported = False
    _interfaces.replace_everywhere()


def disable() -> None:
    """Undoes :func:`enable`: an installed flash-attn is found again, as it was.

    It warns if nothing used the alias: no code imported flash_attn, or had an object of its functions, meanwhile.
    """
    if not enabled():
        return
    used = _finder.imported or len(_interfaces) > 0
    _undo()
    if not used:
        warnings.warn(
            "pyattn: nothing used flash_attn.enable(), got no import of flash_attn and no object of its functions "
            "since then; code that decided before at its own import keeps its choice",
            stacklevel=2,
        )


def _undo() -> None:
    sys.meta_path.remove(_finder)
    _interfaces.restore()
    _take_modules()
    sys.modules.update(_shadowed)
    _shadowed.clear()


@contextmanager
def alias(*, force: bool = False) -> Iterator[None]:
    """:func:`enable` for a block; an alias that was enabled before stays enabled.

    >>> with alias():
    ...     from flash_attn import flash_attn_func
    """
    before = enabled()
    enable(force=force)
    try:
        yield
    finally:
        if not before:
            _undo()


def _take_modules() -> dict[str, ModuleType]:
    """Removes flash-attn's modules from sys.modules and returns them."""
    names = [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: sys.modules.pop(name) for name in names}
