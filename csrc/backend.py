"""The build backend: scikit-build-core's, for the torch that is installed already, and the requirement on torch.

A build in isolation does not see the packages of the environment that it installs into. It would download another
torch, and pip would then replace the user's by the one that was built for. This backend looks for torch there, builds
with its headers, and requires its minor version. ``PYATTN_TORCHES`` names other folders, or one folder that holds
them, as builders of wheels do.
"""

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit

DEFAULT = "torch==2.13.*"
"""The build's torch if the environment has none."""
OLDEST = (2, 11)
"""The oldest torch with the C++ interfaces that the operators use."""


def folders() -> list[Path]:
    """The folders with a package ``torch`` to build for; none if torch is not installed."""
    if given := list(filter(None, os.environ.get("PYATTN_TORCHES", "").split(";"))):
        return [torch for folder in given for torch in inside(Path(folder))]
    spec = find_spec("torch")
    seen = [Path(place).parent for place in spec.submodule_search_locations or ()] if spec else []
    return [folder for folder in (*seen, *hidden()) if (folder / "torch" / "version.py").is_file()][:1]


def inside(folder: Path) -> list[Path]:
    """The folder if it holds a package ``torch``, else the folders in it that do; ends the build if there are none."""
    if (folder / "torch" / "version.py").is_file():
        return [folder]
    places = sorted(path.parents[1] for path in folder.glob("*/torch/version.py"))
    if not places:
        sys.exit(f"pyattn: each folder of PYATTN_TORCHES must hold torch, or folders that do, got {folder}")
    return places


def hidden() -> Iterator[Path]:
    """The environments that a build in isolation does not import from: it asks sysconfig for their folders.

    pip's isolation leaves the prefix as it is. uv and build give the build a separate environment, and the folder of
    the active environment's Python comes after it on the path; uv also installs into ``.venv`` if none is active.
    """
    yield from (Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
    own = Path(sys.prefix, "bin")
    others = [folder for folder in os.environ.get("PATH", "").split(os.pathsep) if Path(folder) != own]
    active = shutil.which("python", path=os.pathsep.join(others))
    for prefix in ([Path(active).parents[1]] if active else []) + [Path(".venv")]:
        places = {"base": str(prefix), "platbase": str(prefix)}
        yield Path(sysconfig.get_path("purelib", "posix_prefix", places))


def minor_of(folder: Path) -> tuple[int, int]:
    """The minor version of the folder's torch, read without importing it."""
    version = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "torch" / "version.py").read_text())
    assert version, f"no version of torch in {folder}"
    return int(version[1]), int(version[2])


def check() -> None:
    """Ends the build with a sentence where there is no torch that fits.

    On Windows, torch's headers import thread-local variables from DLLs, which compilers for a GNU target can't do.
    """
    if sys.platform == "win32":
        sys.exit("pyattn: needs Linux or macOS, got Windows")
    if sys.maxsize < 2**32:
        sys.exit("pyattn: needs a 64-bit Python, because torch has no other")
    for folder in folders():
        minor = minor_of(folder)
        if minor < OLDEST:
            sys.exit(f"pyattn: needs torch 2.11 or later, got torch {minor[0]}.{minor[1]} in {folder}")


def required() -> list[str]:
    """The requirement on torch if the environment has none."""
    check()
    if not folders() and sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        sys.exit("pyattn: needs torch, which has no wheels for musl; build torch, then use pip's --no-build-isolation")
    return [] if folders() else [DEFAULT]


def choose() -> None:
    """Tells CMake which torches to build for."""
    check()
    if not folders():
        sys.exit("pyattn: a build without isolation needs torch 2.11 or later in the environment")
    os.environ["PYATTN_TORCHES"] = ";".join(map(str, folders()))


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The package's dependencies: the minor versions of torch that this build has a border for."""
    minors = sorted(set(map(minor_of, folders())))
    (major, first), (_, last) = minors[0], minors[-1]
    if first == last:
        return {"dependencies": [f"torch=={major}.{first}.*"]}
    others = [f"!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in minors]
    return {"dependencies": [",".join([f"torch>={major}.{first}", f"<{major}.{last + 1}", *others])]}


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    """The dependencies of an sdist are not known before it is built."""
    return {"dependencies": True}


def after(step: Callable[[], Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """scikit-build-core's hook, preceded by a step of ours; lists that both return are joined."""

    @wraps(hook)
    def call(*arguments: Any, **named: Any) -> Any:
        mine = step() or []
        result = hook(*arguments, **named)
        return [*result, *mine] if isinstance(result, list) else result

    return call


build_sdist = scikit.build_sdist
get_requires_for_build_sdist = scikit.get_requires_for_build_sdist
get_requires_for_build_wheel = after(required, scikit.get_requires_for_build_wheel)
get_requires_for_build_editable = after(required, scikit.get_requires_for_build_editable)
prepare_metadata_for_build_wheel = after(choose, scikit.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = after(choose, scikit.prepare_metadata_for_build_editable)
build_wheel = after(choose, scikit.build_wheel)
build_editable = after(choose, scikit.build_editable)
