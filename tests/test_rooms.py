"""Promise: csrc's includes and pyattn's imports only go downwards, in few layers, and never in a circle."""

import ast
import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CSRC = [
    "storage.h",
    "attention.h",
    "shared",
    "cpu/simd",
    "cpu/products",
    "cpu/tiles",
    "cpu/plan",
    "cpu/passes",
    "cpu",
    "cuda/ptx",
    "cuda/products",
    "cuda/plan",
    "cuda/tiles",
    "cuda/passes",
    "cuda",
    "library.h",
    "library",
    "ops",
]
"""The rooms of csrc; each may include those before it, and top-level files may include all."""

BELOW = {
    "options": "locks masks ops",
    "masks": "options",
    "ops": "locks options",
    "reference": "options",
    "derivatives": "locks masks ops options",
    "leading_dimensions": "derivatives options",
    "weights": "derivatives leading_dimensions masks ops options",
    "selection": "derivatives options",
    "attention": "derivatives leading_dimensions options weights",
    "cache": "attention derivatives masks ops options prefix weights",
    "varlen": "cache derivatives ops options weights",
    "prefix": "derivatives options weights",
    "parts": "derivatives ops options",
    "jagged": "attention derivatives masks ops options varlen weights",
    "nn": "attention cache derivatives jagged masks options selection weights",
    "distributed": "attention cache derivatives masks nn ops options varlen weights",
}
"""The rooms of pyattn that each room may import, itself apart; adapters and the command line lie above all of them.

options and masks import each other's modules, but no module is below itself: see :func:`test_layers_of_imports`.
"""

OF_ADAPTERS = {"pyattn", "locks", "options", "masks", "attention", "varlen", "weights"}
"""The public names, the lock of shared state, and the rooms that describe calls."""

FURTHER = {
    "pyattn.adapters.torch_varlen": {"ops"},  # registers kernels under torch's operators
    "pyattn.adapters.flash_attn.backward": {"parts"},  # the backward of one part of the keys, for ring attention
    "pyattn.adapters.flash_attn.kv_cache": {"ops", "cache"},  # caches that are tensors
    "pyattn.adapters.flash_attn.cache.eight_bits": {"ops"},  # the operator over 8 bits
    "pyattn.adapters.flash_attn.cache.layout": {"ops", "cache"},  # the check of block tables
    "pyattn.adapters.flash_attn.hopper.cache_layout": {"cache"},  # the smallest page that is read in place
    "pyattn.adapters.flash_attn.rotary": {"nn"},  # the rotation
    "pyattn.adapters.flex.compiled.scores": {"ops", "derivatives"},  # its own operators, with derivatives
    "pyattn.adapters.flex.scores.attend": {"derivatives"},
    "pyattn.adapters.flex.scores.score_blocks": {"derivatives"},
    "pyattn.adapters.sdpa.at_once": {"ops"},  # kernels under torch's operator, and their counts
    "pyattn.adapters.scratch.masks.filled": {"parts"},  # keys that are filled, beside the others
}
"""Modules of adapters that reach further, each for its reason."""

MOST_FILES = 13
"""In a folder, its __init__.py included: a stranger reads a list of a dozen names at once."""


def includes() -> dict[str, set[str]]:
    """The includes of each file of csrc. The instruction set's header may be any of them."""
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu")]
    graph = {}
    for path in files:
        text, name = path.read_text(), str(path.relative_to(ROOT / "csrc"))
        graph[name] = set(re.findall(r'^#include "(.+)"', text, re.MULTILINE))
        if "#include PYATTN_ISA_HEADER" in text and "simd" in name:
            isas = {"amx", "avx2", "avx512", "avx512_bf16", "neon", "scalar"}
            graph[name] |= {f"cpu/simd/{isa}.h" for isa in isas}
        elif "#include PYATTN_ISA_HEADER" in text:
            graph[name].add("cuda/ptx/ptx.h")
    return graph


def imports() -> dict[str, set[str]]:
    """Each module's imports from pyattn, those inside functions included."""
    names = {}
    for path in (ROOT / "pyattn").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                within = {f"{node.module}.{alias.name}" for alias in node.names}
                compiled = within <= {"pyattn._C", "pyattn._build"}
                graph[name] |= set() if compiled else within & names.keys() or {node.module} & names.keys()
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & names.keys()
        graph[name].discard(name)
    return graph


def layers(graph: dict[str, set[str]]) -> dict[str, int]:
    """How many files lie on the longest way down from each, itself included; CycleError if there is a circle."""
    depth: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        depth[name] = 1 + max((depth[below] for below in graph.get(name, ())), default=0)
    return depth


def room_of(file: str) -> int:
    """The room's index in CSRC: the innermost of the rooms that hold the file."""
    return max((n for n, room in enumerate(CSRC) if file.startswith(room)), key=lambda n: len(CSRC[n]), default=99)


def test_layers_of_includes() -> None:
    graph = includes()
    assert max(layers(graph).values()) <= 13  # 9 without the instruction sets' headers, which build on one another
    pairs = [(file, other) for file, others in graph.items() for other in others]
    assert [pair for pair in pairs if room_of(pair[1]) > room_of(pair[0])] == []
    assert [pair for pair in pairs if {name.partition("/")[0] for name in pair} == {"cpu", "cuda"}] == []
    products = {other for file, other in pairs if file.startswith("cpu/products/")}
    assert {other for other in products if other.startswith("shared/")} <= {"shared/index.h"}  # they know no heads


def test_layers_of_imports() -> None:
    graph = imports()
    depth = layers(graph)
    assert depth["pyattn"] <= 12
    assert max(depth.values()) <= 17  # the command line's layers lie on top of pyattn's


def room_in_pyattn(module: str) -> str:
    """The room of a module: a folder or a file of pyattn; "pyattn" for the package itself."""
    return [*module.split("."), "pyattn"][1]


@pytest.mark.parametrize("room", BELOW)
def test_rooms_import_downwards(room: str) -> None:
    known = {room, *BELOW[room].split()}
    graph = {name: others for name, others in imports().items() if room_in_pyattn(name) == room}
    assert {
        (name, other) for name, others in graph.items() for other in others if room_in_pyattn(other) not in known
    } == set()


def test_adapters_import_public_names_options_and_masks() -> None:
    graph = {name: others for name, others in imports().items() if room_in_pyattn(name) == "adapters"}
    for name, others in graph.items():
        further = {room_in_pyattn(other) for other in others} - OF_ADAPTERS - {"adapters"}
        assert further == FURTHER.get(name, set()), name


def test_files_of_folders() -> None:
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for top in ("csrc", "pyattn")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu")
    )
    assert {folder: n for folder, n in counts.items() if n > MOST_FILES} == {}
