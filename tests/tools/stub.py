"""Writes pyattn/__init__.pyi: the package as editors and type checkers see it, with every option of a function.

Run ``python tests/tools/stub.py`` after a change of the options or of what the package exports:
tests/arguments/test_signatures.py compares.
"""

import inspect
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Literal

from torch import Tensor

import pyattn

STUB = Path(pyattn.__file__).with_suffix(".pyi")

HEAD = '''"""Made by tests/tools/stub.py from the package and pyattn/options/attention_options.py."""

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

'''

RETURNED = ("return_lse", "return_max_score")
"""Arguments that add a result."""


def as_source(function: str, signature: inspect.Signature) -> str:
    """The signature with one parameter per line, and names as the stub imports them."""
    parameters = [str(p) for p in signature.parameters.values()]
    first = next(i for i, p in enumerate(signature.parameters.values()) if p.kind is inspect.Parameter.KEYWORD_ONLY)
    parameters.insert(first, "*")
    returned = inspect.formatannotation(signature.return_annotation)
    source = f"def {function}(\n" + "".join(f"    {p},\n" for p in parameters) + f") -> {returned}: ...\n"
    for module in ("torch.", "typing.", "collections.abc.", "pyattn.cache."):
        source = source.replace(module, "")
    return source.replace("pyattn.options.tensor_types.KeyCache", "KVCache").replace("'", '"')


def forms_of(signature: inspect.Signature) -> list[inspect.Signature]:
    """The overloads of a function: one for each choice of results, which decides the return type."""
    flags = [name for name in RETURNED if name in signature.parameters]
    forms = []
    for values in product((False, True), repeat=len(flags)):
        parameters = dict(signature.parameters)
        for name, value in zip(flags, values, strict=True):
            default = inspect.Parameter.empty if value else value
            parameters[name] = parameters[name].replace(annotation=Literal[value], default=default)
        count = 1 + sum(values)
        returned = tuple[(Tensor,) * count] if count > 1 else Tensor  # type: ignore[misc]
        forms.append(signature.replace(parameters=[*parameters.values()], return_annotation=returned))
    return forms if flags else [signature]


def stub() -> str:
    """The text that the file should hold."""
    imports, functions = [], ""
    for name in pyattn.__all__:
        value = getattr(pyattn, name)
        if isinstance(value, ModuleType):
            imports.append(f"from pyattn import {name} as {name}\n")
        elif hasattr(value, "__signature__"):
            forms = forms_of(inspect.signature(value))
            functions += "".join("@overload\n" * (len(forms) > 1) + as_source(name, form) for form in forms)
        elif name != "__version__":
            imports.append(f"from {value.__module__} import {name} as {name}\n")
    names = "".join(f'    "{name}",\n' for name in pyattn.__all__)
    return f"{HEAD}{''.join(sorted(imports))}\n__version__: str\n__all__ = [\n{names}]\n\n{functions}"


if __name__ == "__main__":
    STUB.write_text(stub())
