"""``torch.jit.script`` refuses pyattn's functions and modules in one sentence, at the first that it meets."""

from typing import Any, NoReturn

from pyattn import nn
from pyattn.attention import attention
from pyattn.cached import attention_with_cache
from pyattn.parts import attention_backward, merge
from pyattn.varlen import attention_varlen
from pyattn.weights import attention_weights

FUNCTIONS: list[Any] = [attention, attention_backward, attention_varlen, attention_weights, attention_with_cache, merge]
MODULES: list[Any] = [
    face for home in (nn, nn.book) for name in home.__all__ if isinstance(face := getattr(home, name), type)
]


def _refuse(*_: object) -> NoReturn:
    """The hook that TorchScript calls before it compiles a function or a module."""
    raise NotImplementedError(
        "pyattn: torch.jit.script compiles no attention of pyattn's; use torch.jit.trace, torch.export or torch.compile"
    )


for _face in (*FUNCTIONS, *MODULES):
    _face.__prepare_scriptable__ = _refuse
