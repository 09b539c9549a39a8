"""Objects of flash-attn's functions that a program makes itself, as nanochat does: it never imports flash_attn.

``nanochat/flash_attention.py`` chooses at import between FlashAttention 3 and torch, and exports a
``types.SimpleNamespace`` named flash_attn with ``flash_attn_func`` and ``flash_attn_with_kvcache``.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

NAME = "flash_attn"
FUNCTIONS = ("flash_attn_func", "flash_attn_with_kvcache")
WATCHED = "flash_attention"
"""The last part of a module's name whose import is watched for such an object."""


class Interfaces:
    """The objects in which functions have been replaced, and the functions that were there."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._replaced: list[tuple[SimpleNamespace, dict[str, Any]]] = []

    def __len__(self) -> int:
        return len(self._replaced)

    def replace_in(self, module: ModuleType) -> None:
        """Replaces the functions of the module's object, if it has one of this kind."""
        found = getattr(module, "__dict__", {}).get(NAME)
        if type(found) is not SimpleNamespace or not all(callable(getattr(found, name, None)) for name in FUNCTIONS):
            return
        if any(found is known for known, _ in self._replaced):
            return
        names = [name for name in vars(found) if name in self._functions]
        self._replaced.append((found, {name: getattr(found, name) for name in names}))
        vars(found).update({name: self._functions[name] for name in names})

    def replace_everywhere(self) -> None:
        """Replaces the functions of such objects in all modules that are imported."""
        for module in list(sys.modules.values()):
            self.replace_in(module)

    def restore(self) -> None:
        """Puts the functions back that were there."""
        for found, functions in self._replaced:
            for name, function in functions.items():
                if getattr(found, name, None) is self._functions[name]:
                    setattr(found, name, function)
        self._replaced.clear()

    def watched(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a module whose import is watched; None for any other."""
        if fullname.rpartition(".")[2] != WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = Watching(spec.loader, self.replace_in)
        return spec


class Watching(importlib.abc.Loader):
    """A module's loader that calls ``after`` with the module after running it."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The module, as its own loader creates it."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, then ``after``."""
        self._loader.exec_module(module)
        self._after(module)
