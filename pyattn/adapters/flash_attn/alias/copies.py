"""Functions of an installed flash-attn that code has bound already: the alias does not reach them."""

import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType


def refuse_copies(shadowed: Iterable[ModuleType]) -> None:
    """RuntimeError if a module outside of these holds one of their functions or classes under a name.

    Such a module would go on with the installed flash-attn while other code gets pyattn's functions.
    """
    own = list(shadowed)
    roots = {module.__name__.partition(".")[0] for module in own}
    theirs = {
        id(value)
        for module in own
        for value in vars(module).values()
        if isinstance(value, (FunctionType, type)) and str(value.__module__).partition(".")[0] in roots
    }
    copies = [
        f"{name}.{bound}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in roots
        for bound, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in theirs
    ]
    if copies:
        raise RuntimeError(
            "pyattn: flash_attn must be enabled before other code imports the installed flash-attn's functions, got "
            f"{', '.join(sorted(copies)[:8])}; enable it first in the process, or delete these modules from sys.modules"
        )
