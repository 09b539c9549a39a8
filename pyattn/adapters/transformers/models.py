"""Models of transformers with their own attention, which ``attn_implementation="pyattn"`` does not replace.

transformers alone would accept the name for them without a word; :mod:`pyattn.adapters.transformers.builds` refuses it.
Its own models are known by their source code, which is read as text. Models of other people are known by what they
call when they run.
"""

import functools
import importlib.util
import re
import sys
import weakref
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

CLASS = re.compile(r"^class (\w*(?:Attention|Attn)\w*)\((.*?)\):\n((?:[ \t#)].*\n|\n)*)", re.MULTILINE)
"""A class with attention in its name: the name, its bases and its code."""

ASKS = "get_interface("
"""The method by which a module gets an attention function from transformers."""

COMPUTES = re.compile(
    r"softmax\(|Softmax|scaled_dot_product_attention\(|multi_head_attention_forward|lsh_cumulation|mra2_attention"
    r"|logsumexp"
)
"""Calls in the code of a class that computes attention itself."""

OTHERWISE = re.compile(r"Deformable|Pooling|Map$|Gated|GRUCell|Residual|PreTrained")
"""Other kinds of modules with attention in their names."""


class OwnAttention(NamedTuple):
    """The classes of a file of models that compute attention themselves.

    Attributes:
        classes: their names.
        asks: whether other modules of the file ask transformers for an attention function, or may do so by the classes
            that they extend: an encoder beside a decoder, or one model of several.
    """

    classes: frozenset[str]
    asks: bool


_MODELS = "transformers.models."
_NOTHING = OwnAttention(frozenset(), True)

CONFIGURATIONS = frozenset(
    {"DeepseekOcr2SamVisionConfig", "GitConfig", "SamHQVisionConfig", "SamVisionConfig", "UnlimitedOcrSamVisionConfig"}
)
"""The configurations of parts of models that choose their attention's class from a table of names."""

BLOCKED = frozenset({"Gemma4AudioConfig"})
"""The configurations of parts of models that cut eager attention's float mask into blocks for their own attention."""

REPEATING = frozenset({"siglip2"})
"""Files whose pooling head repeats the bool mask of its single query for ``nn.MultiheadAttention``."""

READING = frozenset({"nemotron_asr_streaming"})
"""Files whose other layers, convolutions, read the bool mask of all queries."""

EXTENDING = frozenset({"deepseek_v4"})
"""Files whose layers append keys and extend the mask, if it is a float tensor: 0 = visible, lowest number = hidden."""

_callers: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of modules that called the attention function."""


@functools.cache
def own_attention(path: Path) -> OwnAttention:
    """Reads a file of models, such as ``modeling_bloom.py``; without its source, nothing is known."""
    try:
        code = path.read_text(encoding="utf-8")
    except OSError:
        code = ""
    found = [
        name
        for name, bases, body in CLASS.findall(code)
        if ASKS not in body and not OTHERWISE.search(bases + name) and COMPUTES.search(body)
    ]
    asks = ASKS in code or not re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    return OwnAttention(frozenset(found), asks)


def keeping() -> list[str] | None:
    """The names of transformers' architectures that keep their own attention; None if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None:
        return None
    files = [
        path for root in spec.submodule_search_locations or () for path in Path(root).glob("models/*/modeling_*.py")
    ]
    return sorted(path.stem.removeprefix("modeling_") for path in files if own_attention(path).classes)


def described() -> str | None:
    """The installed version of transformers, and how many models keep their own attention; None if not installed."""
    names = keeping()
    return None if names is None else f"{version('transformers')}; {len(names)} models keep their own attention"


def _architecture(kind: type) -> str:
    """The name of a class's file in transformers' models, "bloom" for ``configuration_bloom``; "" for other classes."""
    package, _, name = kind.__module__.rpartition(".")
    return name.partition("_")[2] if package.startswith(_MODELS) else ""


def _own_attention_beside(kind: type) -> OwnAttention:
    """:func:`own_attention` in the file of models beside a class of transformers, or in the class's own."""
    name, file = _architecture(kind), getattr(sys.modules.get(kind.__module__), "__file__", None)
    return _own_attention_in(file, name) if name and file else _NOTHING


@functools.cache
def _own_attention_in(file: str, name: str) -> OwnAttention:
    """:func:`own_attention` of an architecture's models; each mask that is made needs it, and paths are slow."""
    return own_attention(Path(file).with_name(f"modeling_{name}.py"))


def computes_attention_itself(config: type) -> bool:
    """Whether no model of a configuration asks transformers for an attention function."""
    files = [_own_attention_beside(kind) for kind in config.__mro__ if kind.__module__.startswith(_MODELS)]
    return any(own.classes and not own.asks for own in files)


def keeps_its_own(config: type) -> bool:
    """Whether a model of a configuration can't be built with another attention than its own."""
    return computes_attention_itself(config) or config.__name__ in CONFIGURATIONS


def blocks_masks(config: type) -> bool:
    """Whether the attention of a configuration cuts its mask into blocks: see :data:`BLOCKED`."""
    return config.__module__.startswith(_MODELS) and config.__name__ in BLOCKED


def extends_masks(config: type) -> bool:
    """Whether layers of a configuration extend their mask by keys that they append: see :data:`EXTENDING`."""
    return _is_in(config, EXTENDING)


def reads_masks(config: type) -> bool:
    """Whether layers of a configuration other than attention read the mask: see :data:`READING`."""
    return _is_in(config, READING)


def repeats_masks(config: type) -> bool:
    """Whether a pooling head of a configuration works with the mask of its query: see :data:`REPEATING`."""
    return _is_in(config, REPEATING)


def _is_in(config: type, files: frozenset[str]) -> bool:
    """Whether the configuration, or one that it derives from, is of one of these folders of transformers' models."""
    return any(kind.__module__.startswith(_MODELS) and _architecture(kind) in files for kind in config.__mro__)


def has_attention_of_its_own(kind: type[nn.Module]) -> bool:
    """Whether a class of transformers' modules computes attention and does not ask transformers for it."""
    return any(base.__name__ in _own_attention_beside(base).classes for base in kind.__mro__)


def remember(module: nn.Module) -> None:
    """Records a layer that calls the attention function."""
    if not torch.compiler.is_compiling():
        _callers.add(type(module))


def fallbacks(model: nn.Module, name: str) -> list[str]:
    """The lines of :func:`pyattn.adapters.transformers.fallbacks` on parts whose attention is not that of ``name``.

    Each configuration is reported once. Other people's models are known by the calls of their classes so far.
    """
    lines: list[str] = []
    configured: set[int] = set()
    for path, part in model.named_modules():
        where = f"{path or 'the model'} ({type(part).__name__})"
        config = getattr(part, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen is not None and id(config) not in configured:
            configured.add(id(config))
            theirs = type(part).__module__.startswith("transformers.")
            if chosen != name:
                lines.append(f"{where}: attn_implementation is {chosen}")
            elif not (theirs or any(type(layer) in _callers for layer in part.modules())):
                lines.append(f"{where}: it has not called the attention function so far")
        if has_attention_of_its_own(type(part)):
            lines.append(f"{where}: its own attention")
    return lines
