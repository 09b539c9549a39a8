"""transformers' checks whether it can use flash-attn: on a CPU it says no, whatever is installed.

While the alias is on, ``attn_implementation="flash_attention_2"`` and ``"flash_attention_3"`` are available on CPUs.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pyattn.adapters.flash_attn.alias.distributions import PACKAGES

CHECKS = ("is_flash_attn_2_available", "is_flash_attn_3_available")
"""The functions that say no without a GPU."""

CACHED = (*CHECKS, "is_flash_attn_greater_or_equal", "is_flash_attn_4_available", "_package_distribution_mapping")
"""The functions that remember what was installed."""

HOLDERS = (
    "transformers.utils.import_utils",
    "transformers.utils",
    "transformers.modeling_flash_attention_utils",
)
"""The modules in which the checks are looked up, in the order in which they import one another."""

VERSIONS = (2, 3)

ABSENT = object()
"""The value before of an entry that did not exist."""


def _on_cpu() -> bool:
    """Whether a CPU will do: the entry for it in transformers' table of devices."""
    return True


class Availability:
    """The replaced attributes of transformers, and their values before."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []
        self._on = False

    def begin(self) -> None:
        """Makes flash-attn available in the modules of transformers that are imported already."""
        self._on = True
        for name in HOLDERS:
            if (module := sys.modules.get(name)) is not None:
                self.replace_in(module)

    def replace_in(self, module: ModuleType) -> None:
        """Replaces the checks of one of :data:`HOLDERS`, whose name is its own."""
        _forget(module)
        for name in CHECKS:
            check = getattr(module, name, None)
            if callable(check) and not hasattr(check, "of_alias"):
                self._replaced.append((module, name, check))
                setattr(module, name, self._check(check))
        for version in VERSIONS:
            entry = getattr(module, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).get(version)
            if entry is None or not isinstance(entry.get("supported_devices"), tuple):
                continue
            # A dict of this module, so it is restored by its entries.
            self._replaced.append((entry, "supported_devices", entry["supported_devices"]))
            self._replaced.append((entry, "general_availability_check", entry["general_availability_check"]))
            entry["supported_devices"] = (*entry["supported_devices"], (_on_cpu, "cpu"))
            entry["general_availability_check"] = getattr(module, f"is_flash_attn_{version}_available")
        # The distributions of each package, which some releases of transformers read once, at their import.
        if (installed := getattr(module, "PACKAGE_DISTRIBUTION_MAPPING", None)) is not None:
            for distribution, (_, packages) in PACKAGES.items():
                for package in packages:
                    self._replaced.append((installed, package, installed.get(package, ABSENT)))
                    installed[package] = [distribution]

    def end(self) -> None:
        """Puts back what was there."""
        self._on = False
        for holder, name, value in reversed(self._replaced):
            if value is ABSENT:
                holder.pop(name, None)
            elif isinstance(holder, dict):
                holder[name] = value
            else:
                setattr(holder, name, value)
        self._replaced.clear()
        for name in HOLDERS:
            if (module := sys.modules.get(name)) is not None:
                _forget(module)

    def _check(self, original: Callable[..., bool]) -> Callable[..., bool]:
        """The check, true while the alias is on, also for code that keeps it longer."""

        @functools.wraps(original)
        def check(*args: Any, **kwargs: Any) -> bool:
            return self._on or original(*args, **kwargs)

        check.of_alias = True  # type: ignore[attr-defined]
        return check


def _forget(module: ModuleType) -> None:
    """Clears the module's memory of what is installed, and of the functions that it has loaded."""
    for name in CACHED:
        if callable(clear := getattr(getattr(module, name, None), "cache_clear", None)):
            clear()
    if "_loaded_implementation" in vars(module):
        vars(module)["_loaded_implementation"] = None
