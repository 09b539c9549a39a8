"""Makes ``torch.jit.script`` refuse pyattn's functions and modules in one sentence, at the first one it meets."""

from typing import Any, NoReturn


def _refuse(*_: object) -> NoReturn:
    """The hook that TorchScript calls before it compiles a function or a module."""
    raise NotImplementedError(
        "pyattn: torch.jit.script cannot compile pyattn's attention; use torch.jit.trace, torch.export or torch.compile"
    )


def refuse(*faces: Any) -> None:
    """Makes TorchScript refuse these functions and module classes."""
    for face in faces:
        face.__prepare_scriptable__ = _refuse
