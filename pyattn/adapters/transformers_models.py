"""Finds the models of transformers that ask for an attention function by name, by source as transformers does."""

import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import torch
from torch import nn

_ASKS = b"get_interface("
_HAS_ATTENTION = re.compile(rb"^class \w*Attention\w*\(nn\.Module\):", re.MULTILINE)


def installed_with_attention_of_their_own() -> list[str] | None:
    """The architectures of the installed transformers that compute attention themselves, in whole or in part.

    Reads the source of every model, 24 MB in 0.1 s, and imports none. None where transformers is not installed.
    """
    package = importlib.util.find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return None
    models = Path(package.submodule_search_locations[0]) / "models"
    return sorted({path.parent.name for path in models.glob("*/modeling_*.py") if not _asks(path.read_bytes())})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def asks_for_attention(config: type) -> bool:
    """Whether the models of a configuration ask transformers for an attention function.

    transformers judges so itself before ``set_attn_implementation``, but takes any name that a model is made with. A
    compiler calls this once and does not trace it.
    """
    return _source_asks(config)


@functools.cache
def _source_asks(config: type) -> bool:
    models = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    if models is None or models.__name__ == config.__module__:
        return True
    try:
        code = inspect.getsource(models)
    except (OSError, TypeError):  # defined where there is no file
        return True
    return _asks(code.encode())


def _asks(code: bytes) -> bool:
    return _ASKS in code or not _HAS_ATTENTION.search(code)


def has_attention_of_its_own(kind: type[nn.Module]) -> bool:
    """Whether a class of modules computes attention and does not ask transformers for a function that does."""
    if not re.search("attention|attn", kind.__name__, re.IGNORECASE):
        return False
    try:
        code = "".join(
            inspect.getsource(c) for c in kind.__mro__ if c.__module__.split(".")[0] != "torch" and c is not object
        )
    except (OSError, TypeError):  # defined where there is no file
        return False
    return _ASKS not in code.encode() and bool(re.search(r"softmax\(|scaled_dot_product_attention", code))
