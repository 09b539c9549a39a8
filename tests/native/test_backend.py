"""Promise: a build takes the torch that is there and requires its minor version, or refuses in one sentence."""

import os
import platform
import sys
import sysconfig
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "csrc"
STEPS = ("get_requires_for_build", "prepare_metadata_for_build", "build")
HOOKS = [f"{step}_{kind}" for step in STEPS for kind in ("sdist", "wheel", "editable")]


def asked(*_: Any) -> list[str]:
    """A hook of scikit-build-core's: what it would install."""
    return ["ninja"]


def environment(folder: Path, torch: str) -> Path:
    """A folder with a package torch of this version, of which only version.py is read."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "version.py").write_text(f"__version__ = '{torch}'\ncuda: str | None = None\n")
    return folder


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The build backend in an empty environment, with hooks in place of scikit-build-core's."""
    scikit = SimpleNamespace(build=SimpleNamespace(**dict.fromkeys(HOOKS, asked)))
    monkeypatch.setitem(sys.modules, "scikit_build_core", scikit)
    spec = spec_from_file_location("backend", FOLDER / "backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    found = sysconfig.get_path
    places = {"purelib": str(tmp_path / "pure"), "platlib": str(tmp_path / "plat")}
    monkeypatch.setattr(
        sysconfig, "get_path", lambda name, *more: found(name, *more) if more else places.get(name) or found(name)
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("PYATTN_TORCHES", raising=False)
    monkeypatch.chdir(tmp_path)
    return module


def site_packages(prefix: Path) -> Path:
    """Where an environment keeps its packages."""
    return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(prefix)}))


def test_an_empty_environment_gets_one_torch(builder: ModuleType) -> None:
    assert builder.get_requires_for_build_wheel() == ["ninja", builder.DEFAULT]


@pytest.mark.parametrize("place", ["pure", "plat"])
def test_the_environment_of_pip(builder: ModuleType, tmp_path: Path, place: str) -> None:
    """The torch that is there is neither downloaded nor replaced, whatever else is on the path."""
    environment(tmp_path / place, "2.15.0+cpu")
    environment(site_packages(tmp_path / ".venv"), "2.11.0")
    assert builder.get_requires_for_build_editable() == ["ninja"]
    assert builder.dynamic_metadata({}, {}) == {"dependencies": ["torch==2.15.*"]}
    builder.build_wheel("dist")
    assert os.environ["PYATTN_TORCHES"] == str(tmp_path / place)


def test_the_active_environment_of_uv(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    active = tmp_path / "active" / "bin"
    active.mkdir(parents=True)
    (active / "python").touch(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.prefix, "bin")), str(active)]))
    environment(site_packages(tmp_path / "active"), "2.14.1")
    environment(site_packages(tmp_path / ".venv"), "2.11.0")
    assert builder.required() == []
    assert builder.dynamic_metadata({}, {}) == {"dependencies": ["torch==2.14.*"]}


def test_the_folder_of_uv(builder: ModuleType, tmp_path: Path) -> None:
    environment(site_packages(tmp_path / ".venv"), "2.12.1")
    assert builder.required() == []
    assert builder.dynamic_metadata({}, {}) == {"dependencies": ["torch==2.12.*"]}


@pytest.mark.parametrize(
    ("versions", "requirement"),
    [
        (["2.13.0"], "torch==2.13.*"),
        (["2.11.0", "2.12.1", "2.13.0"], "torch>=2.11,<2.14"),
        (["2.15.0", "2.11.0", "2.13.0+cpu"], "torch>=2.11,<2.16,!=2.12.*,!=2.14.*"),
    ],
)
def test_several_torches(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: list[str], requirement: str
) -> None:
    folders = [str(environment(tmp_path / version, version)) for version in versions]
    monkeypatch.setenv("PYATTN_TORCHES", ";".join([*folders, ""]))
    assert builder.required() == []
    assert builder.dynamic_metadata({}, {}) == {"dependencies": [requirement]}


def test_a_folder_of_torches(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CMake gets the folders in it, in the order of the versions."""
    inside = [str(environment(tmp_path / "all" / minor, f"{minor}.1")) for minor in ("2.12", "2.11")]
    (tmp_path / "all" / "notes").mkdir()
    monkeypatch.setenv("PYATTN_TORCHES", str(tmp_path / "all"))
    assert builder.dynamic_metadata({}, {}) == {"dependencies": ["torch>=2.11,<2.13"]}
    builder.build_wheel("dist")
    assert os.environ["PYATTN_TORCHES"] == ";".join(reversed(inside))


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "build_wheel"])
def test_a_folder_without_torch(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """One of several folders, without which the wheel would lack a version of torch."""
    there = environment(tmp_path / "there", "2.13.0")
    monkeypatch.setenv("PYATTN_TORCHES", f"{there};{tmp_path / 'missing'}")
    with pytest.raises(
        SystemExit, match=f"^pyattn: each folder of PYATTN_TORCHES must hold torch, .*{tmp_path}/missing$"
    ):
        getattr(builder, hook)()


def test_refusals(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends the build with one sentence in place of a compiler's errors."""
    with pytest.raises(SystemExit, match=r"^pyattn: a build without isolation needs torch 2\.11 or later"):
        builder.build_wheel("dist")
    if sys.platform == "linux":
        with monkeypatch.context() as patch:
            patch.setattr(platform, "libc_ver", lambda: ("", ""))
            with pytest.raises(SystemExit, match=r"^pyattn: needs torch, which has no wheels for musl"):
                builder.get_requires_for_build_wheel()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        with pytest.raises(SystemExit, match=r"^pyattn: needs Linux or macOS, got Windows$"):
            builder.get_requires_for_build_editable()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "maxsize", 2**31 - 1)
        with pytest.raises(SystemExit, match=r"^pyattn: needs a 64-bit Python"):
            builder.get_requires_for_build_wheel()
    folder = environment(tmp_path / "pure", "2.10.2+cu128")
    for hook in (
        builder.get_requires_for_build_wheel,
        builder.build_editable,
        builder.prepare_metadata_for_build_wheel,
    ):
        with pytest.raises(SystemExit, match=rf"^pyattn: needs torch 2\.11 or later, got torch 2\.10 in {folder}$"):
            hook()
