"""pyattn/__init__.pyi: the package as editors and type checkers show it, every option of a function written out.

Run ``python tests/tools/stub.py`` after a change of the options or of what the package exports:
tests/test_signatures.py compares.
"""

import inspect
from pathlib import Path
from types import ModuleType

from typing_extensions import get_overloads

import pyattn
from pyattn.options import with_options

STUB = Path(pyattn.__file__).with_suffix(".pyi")

HEAD = '''"""Made by tests/tools/stub.py from the package and pyattn/options.py."""

from typing import Literal, overload

from torch import Tensor

'''


def line_of(name: str, module: str) -> str:
    return f"from {module} import {name} as {name}\n"


def as_source(signature: inspect.Signature) -> str:
    """The parameters and what the function returns, names as the stub imports them."""
    words = str(signature)
    for module in ("torch.", "typing.", "pyattn.cache.", "pyattn.parts."):
        words = words.replace(module, "")
    return words


def stub() -> str:
    """What the file should hold."""
    imports, functions = "", ""
    for name in sorted(pyattn.__all__):
        value = getattr(pyattn, name)
        if isinstance(value, ModuleType):
            imports += line_of(name, "pyattn")
        elif hasattr(value, "__signature__"):
            forms = [with_options(inspect.signature(form)) for form in get_overloads(value)]
            for form in forms or [inspect.signature(value)]:
                functions += "@overload\n" * bool(forms) + f"def {name}{as_source(form)}: ...\n"
        elif name != "__version__":
            imports += line_of(name, value.__module__)
    names = "".join(f'    "{name}",\n' for name in pyattn.__all__)
    return f"{HEAD}{imports}\n__version__: str\n__all__ = [\n{names}]\n\n{functions}"


if __name__ == "__main__":
    STUB.write_text(stub())
