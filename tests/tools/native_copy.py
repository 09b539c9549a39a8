"""Copies in which faults are planted in the native side: configured, compiled by units, tested."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import emulated
import pybind11
from faults import BadFaultError
from source_copy import SourceCopy

import pyattn
from pyattn import _build

LIKELY = {
    "cache/cache": ("ops/caches/cache.h", "ops/caches/cache.cpp"),
    "gpu/cache": ("ops/caches/cache_cuda.cpp",),
    "attention/decode": (
        "cpu/passes/decode/decode.h",
        "cpu/passes/decode/item.h",
        "cpu/plan/backward_splits.h",
        "cpu/plan/forward_splits.h",
        "cpu/products/dots.h",
    ),
    "attention/selected": (
        "cpu/passes/listed/backward.h",
        "cpu/passes/listed/block_backward.h",
        "cpu/passes/listed/block_forward.h",
        "cpu/passes/listed/block_lists.h",
        "cpu/passes/listed/few_rows.h",
        "cpu/passes/listed/lane_backward.h",
        "cpu/passes/listed/lane_rows.h",
        "cpu/passes/listed/listed_keys.h",
        "cpu/passes/listed/queries.h",
        "cpu/plan/selected_sums.h",
        "ops/selected/call.cpp",
        "ops/selected/elements.h",
        "ops/selected/lists.h",
        "shared/selected_keys.h",
    ),
    "attention/selected_errors": ("ops/paged.cpp",),
    "pages/selected": ("ops/paged.cpp", "ops/selected/call.cpp"),
    "cache/eight_bits": ("cpu/products/few/byte_products.h", "cpu/products/few/byte_tiles.h"),
    "options/row_invariance": (
        "cpu/passes/decode/invariant_item.h",
        "cpu/passes/forward_item.h",
        "cpu/products/ordered_dots.h",
    ),
    "options/dropout": ("cpu/tiles/dropout.h", "cuda/tiles/dropout.h"),
    "options/dropout_origins": ("cpu/tiles/dropout.h", "cuda/tiles/dropout.h", "shared/dropout.h"),
    "derivatives/native_graph": ("ops/autograd.h",),
    "native/math": ("cpu/simd/math.h",),
    "attention/laws": ("cpu/simd/half.h",),
    "attention/layouts": ("ops/dense.cpp", "ops/params.h"),
    "pages/page_table": ("ops/caches/cache_pages.cpp", "ops/caches/pages_cuda.cpp"),
    "pages/pages": ("cpu/tiles/keys.h", "ops/caches/cache_pages.cpp", "ops/paged.cpp", "ops/pages.h"),
    "gpu/pages": ("ops/caches/pages_cuda.cpp",),
    "cache/keep": ("ops/caches/keep.h",),
    "cache/ring_buffer": ("ops/caches/cache.cpp",),
    "masks/header": ("shared/mask.h", "shared/row_mask.h"),
    "attention/rows_of_weight_zero": ("cpu/tiles/softmax_gradient.h", "cuda/passes/row_terms.h"),
    "native/splits": ("cuda/plan/forward_splits.h", "cuda/passes/merge.h"),
    "native/cuda_relative": (
        "cuda/passes/backward_tile.h",
        "cuda/tiles/relative_bias.h",
        "cuda/passes/relative_gradient.h",
        "cuda/plan/workspace.h",
    ),
    "attention/threads": ("ops/devices/host.cpp", "library/float_control.h"),
    "threads/calls": ("library/profile.cpp",),
    "varlen/varlen": (
        "cpu/plan/units.h",
        "cpu/plan/work.h",
        "cuda/plan/sequences.h",
        "ops/packed.cpp",
        "ops/packing.h",
    ),
    "varlen/errors": ("ops/packing.h",),
}
"""The tests most likely to catch a fault, by its file in csrc; they run first."""
TESTS = (
    "attention/accuracy",
    "masks/masks",
    "options/scores",
    "attention/laws",
    "attention/threads",
    "attention/decode",
    "cache/cache",
    "attention/layouts",
    "attention/rows_of_weight_zero",
    "attention/selected",
    "pages/selected",
    "cache/eight_bits",
    "options/dropout",
    "options/dropout_origins",
    "options/row_invariance",
    "native/math",
    "pages/pages",
    "cache/ring_buffer",
    "native/splits",
    "varlen/varlen",
    "varlen/pages",
    "native/cuda",
    "native/cuda_relative",
    "native/cuda_races",
)
"""Tests that run once for each backend."""
OTHER_TESTS = (
    "masks/header",
    "derivatives/autograd",
    "derivatives/native_graph",
    "native/build",
    "arguments/errors",
    "cache/cache",
    "cache/errors",
    "pages/page_errors",
    "cache/keep",
    "gpu/cache",
    "pages/pages",
    "pages/page_table",
    "gpu/pages",
    "attention/selected_errors",
    "varlen/selected",
    "varlen/varlen",
    "varlen/errors",
    "varlen/pages",
    "varlen/page_errors",
    "threads/calls",
)
"""Tests that run with the active instruction set."""
assert LIKELY.keys() <= {*TESTS, *OTHER_TESTS}
RUN = """
import sys
from pathlib import Path
copy = Path(sys.argv[1])
sys.path.insert(0, str(copy / "tests" / "tools"))
import emulated, pyattn, pyattn._C, pytest
assert all(Path(m.__file__).is_relative_to(copy) for m in (emulated, pyattn, pyattn._C)), pyattn._C.__file__
compile_kernels = emulated.compile_kernels
emulated.compile_kernels = lambda *a, **k: compile_kernels(*a, **k) if k else copy / "emulated.so"  # k: instrumented
sys.exit(pytest.main(sys.argv[2:]))
"""


class Unit(NamedTuple):
    """An object of the native side.

    Attributes:
        command: Compiles it, in the folder ``build``.
        backend: The backend whose kernels it holds; "" for the rest of the module.
    """

    object: str
    command: list[str]
    backend: str


class NativeCopy(SourceCopy):
    """A configured copy of what git tracks. It compiles at -O1, because the source alone decides the bits."""

    run_tests = RUN
    idle = 60

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cwd = self.build = folder / "build"
        version = re.findall(r'__version__ = "(.*)"', (folder / "pyattn" / "__init__.py").read_text())[0]
        options = {"CMAKE_BUILD_TYPE": "Release", "PYATTN_CUDA": "OFF", "SKBUILD_PROJECT_VERSION": version}
        options |= {"Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11.get_cmake_dir()}
        options |= {"CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(folder / "pyattn"), "PYATTN_WERROR": "OFF"}
        options["CMAKE_UNITY_BUILD"] = "OFF"  # a fault in one file is compiled with it alone
        options["PYATTN_ISAS"] = ";".join(isa for isa in pyattn.isas() if isa != "scalar")  # those that tests can run
        defines = [f"-D{name}={value}" for name, value in options.items()]
        self.run(["cmake", "-S", ".", "-B", "build", "-G", "Ninja", *defines], cwd=folder)
        shutil.copy2(self.build / "_build.py", folder / "pyattn")
        self.units = list(self.native_units()) + list(self.emulated_units())

    def native_units(self) -> Iterator[Unit]:
        for entry in json.loads((self.build / "compile_commands.json").read_text()):
            command = ["-O1" if x == "-O2" else x for x in shlex.split(entry["command"])]
            at = command.index("-o")
            isa = re.search(r"kernels_(\w+)\.dir", command[at + 1])
            yield Unit(command[at + 1], command[:at] + command[at + 2 :], isa[1] if isa else "")

    def emulated_units(self) -> Iterator[Unit]:
        flags = ["-O1" if x == "-O2" else x for x in (*emulated.FLAGS, *emulated.INCLUDES)]
        flags = [f"-I../{x.removeprefix('-I')}" if x.startswith("-I") else x for x in flags]
        for dtype, packed in emulated.units(emulated.DTYPES):
            source = ["-w", *emulated.defines(dtype, packed), "-x", "c++"]
            command = ["c++", *flags, *source, "-c", "../csrc/cuda/kernels.cu"]
            yield Unit(f"emulated_{dtype}_{packed}.o", command, "emulated")
        for source in emulated.SOURCES:
            yield Unit(f"emulated_{Path(source).stem}.o", ["c++", *flags, "-c", f"../{source}"], "emulated")

    def tests(self) -> set[str]:
        return {_path(name) for name in (*TESTS, *OTHER_TESTS)}

    def compile(self, unit: Unit, *options: str) -> None:
        result = self.run([*unit.command, *options], check=False)
        if result.returncode:
            error = re.search(r"error: .*", result.stderr)
            raise BadFaultError(f"does not compile: {error[0] if error else result.stderr[-300:]}")

    def link(self) -> None:
        """Links the libraries, by CMake's commands for them, and that of the emulated kernels."""
        for target in ("pyattn", "_C", *(f"pyattn_torch_{minor}" for minor in _build.torches)):
            command = self.run(["ninja", "-t", "commands", target]).stdout.splitlines()[-1]
            self.run(["sh", "-c", command])
        objects = [unit.object for unit in self.units if unit.backend == "emulated"]
        self.run(["c++", "-shared", "-pthread", "-o", "../emulated.so", *objects])

    def read(self, unit: Unit) -> set[str]:
        """The files of the project that the unit is compiled from."""
        made_from = self.run([*unit.command, "-MM"]).stdout.replace("\\\n", " ").split()[1:]
        paths = ((self.build / name).resolve() for name in made_from)
        return {
            str(path.relative_to(self.folder.resolve())) for path in paths if path.is_relative_to(self.folder.resolve())
        }

    def caught_by(self, file: str, backend: str) -> str | None:
        """The first test that fails, of one backend or, if "", of all instruction sets."""
        likely = {name for name, files in LIKELY.items() if file.removeprefix("csrc/") in files}

        def run(names: tuple[str, ...], first: bool, *options: str) -> str | None:
            chosen = [_path(name) for name in names if (name in likely) == first]
            return self.first_failure(*options, *chosen, isa=backend.replace("emulated", "")) if chosen else None

        for first in (True, False):
            by = run(TESTS, first, "--backend", backend or "cpu")
            if by or ((first or backend != "emulated") and (by := run(OTHER_TESTS, first))):
                return by
        return None


def _path(name: str) -> str:
    """The file of tests with this name."""
    return f"tests/{name.replace('/', '/test_')}.py"
