"""``import flash_attn``, ``flash_attn_interface`` and ``flash_attn_3`` find the adapter while the alias is on."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from pyattn.adapters.flash_attn.alias import distributions
from pyattn.adapters.flash_attn.alias.availability import HOLDERS, Availability
from pyattn.adapters.flash_attn.alias.copies import refuse_copies
from pyattn.adapters.flash_attn.alias.interfaces import Interfaces, Watching
from pyattn.adapters.flash_attn.alias.modules import INTERFACE, ROOTS, modules
from pyattn.locks import Lock

__all__ = ["alias", "disable", "enable", "enabled"]


class _Finder(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Creates the modules when they are imported."""

    def __init__(self) -> None:
        self.imported = False
        self.fa3_returns_lse = False
        self.modules: dict[str, dict[str, Any]] = {}

    def begin(self, fa3_returns_lse: bool) -> None:
        """Takes the modules' contents for what FlashAttention 3's functions return."""
        self.imported = False
        self.fa3_returns_lse, self.modules = fa3_returns_lse, modules(fa3_returns_lse)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module of the alias, or of one that may have an object of its functions.

        ImportError for any other module of flash-attn.
        """
        if fullname in self.modules:
            self.imported = True
            package = any(name.startswith(f"{fullname}.") for name in self.modules)
            return importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=package)
        root, dot, _ = fullname.partition(".")
        if dot and root in ROOTS:
            # No name=: with it, ``from flash_attn import X`` would swallow this error and its reason.
            has = ", ".join(name for name in self.modules if self.modules[name] and name.partition(".")[0] == root)
            raise ModuleNotFoundError(f"pyattn: a module of the {root} alias must be one of {has}, got {fullname}")
        if fullname in HOLDERS:
            return _watched(fullname, path, target)
        return _interfaces.watched(fullname, path, target)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """The distributions flash-attn and flash-attn-3, for importlib.metadata."""
        return distributions.found(context or self.Context())

    def exec_module(self, module: ModuleType) -> None:
        """Fills the module; flash_attn imports its interface, so code finds it as an attribute."""
        vars(module).update(self.modules[module.__name__])
        interface = f"{module.__name__}.flash_attn_interface"
        if interface in self.modules:
            importlib.import_module(interface)


_finder = _Finder()
_interfaces = Interfaces(INTERFACE)
_availability = Availability()
_shadowed: dict[str, ModuleType] = {}
_lock = Lock()
_users = {"enable": 0, "blocks": 0}
"""Whether :func:`enable` was called, and how many blocks of :func:`alias` are open, in all threads."""


def enabled() -> bool:
    """Whether ``import flash_attn`` finds this adapter."""
    return _finder in sys.meta_path


def enable(*, force: bool = False, fa3_returns_lse: bool = False) -> None:
    """Makes ``import flash_attn`` find this adapter, in the whole process, until :func:`disable`.

    The names are flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding, flash_attn.layers.rotary and
    flash_attn.ops.triton.rotary of version 2, flash_attn_interface, flash_attn_3 and flash_attn_3.flash_attn_interface
    of version 3, flash_attn.cute and flash_attn.cute.interface of version 4; any other, such as flash_attn.losses,
    raises ImportError. Names that code has already imported keep working after :func:`disable`. importlib.metadata
    finds the distributions flash-attn and flash-attn-3.

    A program may have an object of these functions in place of the import, as nanochat has in ``flash_attention.py``: a
    ``SimpleNamespace`` named flash_attn with flash_attn_func and flash_attn_with_kvcache. Its functions are replaced by
    these, in modules that are imported already and in any named ``flash_attention`` that are imported later.

    transformers' ``attn_implementation="flash_attention_2"`` and ``"flash_attention_3"`` are available on a CPU,
    whether transformers is imported before or after.

    Args:
        force: whether to replace an installed flash-attn.
        fa3_returns_lse: whether flash_attn_func, flash_attn_varlen_func and flash_attn_qkvpacked_func of version 3
            return (out, softmax_lse) in any case, as until July 2025; default: out, or both with return_attn_probs, as
            since then.

    Raises:
        RuntimeError: flash-attn is installed or imported, and ``force`` is not given; another module has bound
            functions of the installed one already; it is enabled with another fa3_returns_lse.
    """
    with _lock:
        _switch_on(force, fa3_returns_lse)
        _users["enable"] = 1


def disable() -> None:
    """Undoes :func:`enable`: an installed flash-attn is found again, as it was. Open :func:`alias` blocks keep it on.

    It warns if nothing used the alias: no code imported flash_attn, or had an object of its functions, meanwhile.
    """
    with _lock:
        if not _users["enable"]:
            return
        used = _finder.imported or len(_interfaces) > 0
        _users["enable"] = 0
        _switch_off_unless_used()
    if not used:
        warnings.warn(
            "pyattn: nothing used flash_attn.enable(), got no import of flash_attn and no object of its functions "
            "since then; code that decided before at its own import keeps its choice",
            stacklevel=2,
        )


@contextmanager
def alias(*, force: bool = False, fa3_returns_lse: bool = False) -> Iterator[None]:
    """:func:`enable` for a block. Blocks may be nested, and overlap in several threads; all threads are affected.

    >>> with alias():
    ...     from flash_attn import flash_attn_func
    """
    with _lock:
        _switch_on(force, fa3_returns_lse)
        _users["blocks"] += 1
    try:
        yield
    finally:
        with _lock:
            _users["blocks"] -= 1
            _switch_off_unless_used()


def _switch_on(force: bool, fa3_returns_lse: bool) -> None:
    """Installs the alias, unless it is on; the errors are those of :func:`enable`."""
    if enabled():
        if _finder.fa3_returns_lse != fa3_returns_lse:
            raise RuntimeError(
                f"pyattn: flash_attn is enabled with fa3_returns_lse={_finder.fa3_returns_lse}; call disable() first, "
                f"got {fa3_returns_lse}"
            )
        return
    for root in ROOTS:
        if not force and (root in sys.modules or importlib.util.find_spec(root) is not None):
            where = getattr(sys.modules.get(root), "__file__", None) or importlib.util.find_spec(root)
            raise RuntimeError(f"pyattn: {root} must not be installed, or force=True given, got {where}")
    refuse_copies([module for name, module in list(sys.modules.items()) if _is_ours(name)])
    _shadowed.update(_take_modules())
    _finder.begin(fa3_returns_lse)
    sys.meta_path.insert(0, _finder)
    _interfaces.replace_everywhere()
    _availability.begin()


def _switch_off_unless_used() -> None:
    """Undoes :func:`_switch_on` if neither :func:`enable` nor a block wants the alias."""
    if any(_users.values()) or not enabled():
        return
    sys.meta_path.remove(_finder)
    _interfaces.restore()
    _take_modules()
    sys.modules.update(_shadowed)
    _shadowed.clear()
    _availability.end()


def _is_ours(name: str) -> bool:
    """Whether a module's name is one of flash-attn's."""
    return name.partition(".")[0] in ROOTS


def _take_modules() -> dict[str, ModuleType]:
    """Removes flash-attn's modules from sys.modules and returns them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}


def _watched(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module of transformers, whose checks are replaced after its import."""
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if spec is not None and spec.loader is not None:
        spec.loader = Watching(spec.loader, _availability.replace_in)
    return spec
