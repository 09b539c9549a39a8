"""Promise: the native module is the requested one: its instruction sets, how one is chosen, what it reports."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from editable import WITHOUT_EDITABLE
from support import fresh

import pyattn
from pyattn import _C, _build, attention


def test_versions() -> None:
    assert _C.version == pyattn.__version__
    assert torch.__version__ in _build.torches.values()
    assert _C.compiler


def test_instruction_sets_are_listed_best_first() -> None:
    assert _C.compiled_isas()[-1] == "scalar"
    ordered = [isa for isa in _C.compiled_isas() if isa in pyattn.isas()]
    if "avx512_bf16" in ordered and "Intel" in Path("/proc/cpuinfo").read_text():  # multiplies bfloat16 slowly there
        at = ordered.index("avx512_bf16")
        ordered[at : at + 2] = "avx512", "avx512_bf16"
    assert pyattn.isas() == ordered
    default = fresh.python("-c", "import pyattn; print(pyattn.isa())", PYATTN_ISA="")
    assert default.stdout.split() == pyattn.isas()[:1]


@pytest.mark.parametrize("name", pyattn.isas())
def test_environment_variable_chooses(name: str) -> None:
    assert fresh.python("-c", "import pyattn; print(pyattn.isa())", PYATTN_ISA=name).stdout.split() == [name]


def test_unknown_name_in_the_environment() -> None:
    result = fresh.python("-c", "import pyattn; pyattn.isa()", PYATTN_ISA="mmx")
    allowed = ", ".join(pyattn.isas())
    last = f"ValueError: pyattn: PYATTN_ISA in the environment must be one of {allowed}, got 'mmx'"
    assert result.stderr.splitlines()[-1] == last


@pytest.mark.parametrize("name", pyattn.isas())
def test_the_public_functions_choose_for_the_process(name: str) -> None:
    before = pyattn.isa()
    try:
        pyattn.set_isa(name)
        assert pyattn.isa() == _C.active_isa() == name
        assert fresh.python("-c", "import pyattn; print(pyattn.isa())").stdout.split() == [before]
    finally:
        pyattn.set_isa(before)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("sse9", ValueError, f"instruction set must be one of {', '.join(pyattn.isas())}, got 'sse9'"),
        (2, TypeError, "name must be str, got 2"),
        (None, TypeError, "name must be str, got None"),
    ],
)
def test_unknown_names(name: object, kind: type[Exception], message: str) -> None:
    before = pyattn.isa()
    with pytest.raises(kind, match=f"^pyattn: {re.escape(message)}$"):
        pyattn.set_isa(name)  # type: ignore[arg-type]
    assert pyattn.isa() == before


def test_instruction_sets_differ_in_rounding() -> None:
    """The named one runs: vectors of another width, or without fused multiply-add, round differently."""
    q, k, v = torch.randn(3, 1, 2, 300, 32)
    results = {}
    before = pyattn.isa()
    for isa in pyattn.isas():
        pyattn.set_isa(isa)
        results[isa] = attention(q, k, v)
    pyattn.set_isa(before)
    if "avx2" in results:
        assert not torch.equal(results["avx2"], results["scalar"])
    for isa in {"amx", "avx512_bf16"} & results.keys():  # they differ from the set below them in bfloat16 alone
        assert torch.equal(results[isa], results["avx512"])


def test_another_torch_is_refused() -> None:
    """Import stops before the native module is loaded, and names the command that rebuilds it."""
    result = fresh.python("-c", "import torch; torch.__version__ = '9.8.0'; import pyattn")
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: pyattn: built for torch")
    assert "got torch 9.8.0" in last
    assert "pip install --no-build-isolation" in last


def test_without_torch() -> None:
    result = fresh.python("-c", "import sys; sys.modules['torch'] = None; import pyattn")
    minor = list(_build.torches)[-1]
    expected = f"ImportError: pyattn: needs torch; install it with \"pip install 'torch=={minor}.*'\""
    assert result.stderr.strip().splitlines()[-1] == expected


def test_a_source_folder_says_what_to_do(tmp_path: Path) -> None:
    package = Path(pyattn.__file__).parent
    shutil.copytree(package, tmp_path / "pyattn", ignore=shutil.ignore_patterns("*.so", "_build.py", "__pycache__"))
    result = fresh.python("-c", WITHOUT_EDITABLE + f"sys.path.insert(0, {str(tmp_path)!r})\nimport pyattn\n")
    assert "pyattn: this folder holds the package's source without its native module" in result.stderr
    assert "pip install -e ." in result.stderr


BROKEN_TORCH = """
import sys

class Broken:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ImportError("libtorch.so: file too short")

del sys.modules["torch"]
sys.meta_path.insert(0, Broken())
import pyattn
"""


def test_libraries_that_do_not_load(tmp_path: Path) -> None:
    """An error names the library: neither torch nor the native module is missing."""
    assert fresh.python("-c", BROKEN_TORCH).stderr.splitlines()[-1] == "ImportError: libtorch.so: file too short"
    for part in (pyattn, _C):  # an editable install keeps the libraries elsewhere
        shutil.copytree(Path(str(part.__file__)).parent, tmp_path / "pyattn", dirs_exist_ok=True)
    (library,) = tmp_path.glob("pyattn/libpyattn.*")
    library.write_bytes(b"")
    done = fresh.python("-c", WITHOUT_EDITABLE + f"sys.path.insert(0, {str(tmp_path)!r})\nimport pyattn\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: pyattn: the native module must load on this system, got '{library}: ")
    assert last.endswith("in the checkout")


def test_a_second_copy_in_one_process(tmp_path: Path) -> None:
    """Importing the same copy again is refused as well, because torch can't forget what the first import registered."""
    for part in (pyattn, _C):  # an editable install keeps the libraries elsewhere
        shutil.copytree(Path(str(part.__file__)).parent, tmp_path / "pyattn", dirs_exist_ok=True)
    forget = "import sys, pyattn\nfor name in list(sys.modules):\n    if 'pyattn' in name: del sys.modules[name]\n"
    for other in ("", f"{WITHOUT_EDITABLE}sys.path.insert(0, {str(tmp_path)!r})\n"):
        last = fresh.python("-c", f"{forget}{other}import pyattn").stderr.splitlines()[-1]
        assert last.startswith("ImportError: pyattn: this process has registered the operators of /")
        assert last.endswith("in a new process")


def test_a_forked_child_does_not_hang() -> None:
    """A forked child lacks the threads of torch's own operators, so it compares results with one thread."""
    result = fresh.python(
        "-c",
        "import os, torch\n"
        "from pyattn import attention\n"
        "torch.set_num_threads(2)\n"
        "q, k, v = torch.randn(3, 1, 4, 500, 64)\n"
        "out = attention(q, k, v)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    again = attention(q, k, v)\n"
        "    torch.set_num_threads(1)\n"
        "    os._exit(0 if torch.equal(again, out) else 1)\n"
        "print(os.waitpid(child, 0)[1])\n",
    )
    assert result.stdout.split() == ["0"]
