"""Promise: a release has one version everywhere, the hashes of its files, and a page that names its systems."""

import hashlib
import subprocess
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "release.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="the sdist does not have it")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in a small repository of version 1.2.0."""
    spec = spec_from_file_location("release", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    root = tmp_path / "root"
    for folder in ("pyattn", ".github"):
        (root / folder).mkdir(parents=True)
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (root / "pyattn" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (root / ".github" / "CHANGELOG.md").write_text(
        "# Changes\n\n## 1.2.0 (unreleased)\n\n- new\n\n## 1.1.0 (2026)\n\n- old\n"
    )
    git(root, "init", "--quiet")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "--message", "a")
    monkeypatch.setattr(module, "ROOT", root)
    return module


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def wheel(folder: Path, tags: str, version: str = "1.2.0") -> Path:
    path = folder / f"pyattn-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as content:
        content.writestr(f"pyattn-{version}.dist-info/METADATA", "Name: pyattn\nRequires-Dist: torch>=2.11,<2.16\n")
    return path


def test_one_version(release: ModuleType) -> None:
    assert release.version() == "1.2.0"
    (release.ROOT / "pyattn" / "__init__.py").write_text('__version__ = "1.1.0"\n')
    with pytest.raises(SystemExit, match=r"must name one version, got .*'pyattn/__init__\.py': '1\.1\.0'"):
        release.version()


def test_a_tag_needs_its_version_and_a_date(release: ModuleType) -> None:
    git(release.ROOT, "tag", "v1.2.0")
    with pytest.raises(SystemExit, match=r"the changelog must have the date of 1\.2\.0, which is tagged"):
        release.version()
    changes = release.ROOT / ".github" / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("unreleased", "2026-11-27"))
    assert release.version() == "1.2.0"
    git(release.ROOT, "tag", "v1.3.0")
    with pytest.raises(SystemExit, match=r"must name one version, got .*'the tag v1\.3\.0': '1\.3\.0'"):
        release.version()


def test_the_page(release: ModuleType, tmp_path: Path) -> None:
    made = [
        wheel(tmp_path, "cp310-cp310-manylinux_2_28_x86_64"),
        wheel(tmp_path, "cp314-cp314t-manylinux_2_28_aarch64"),
        wheel(tmp_path, "cp310-cp310-macosx_14_0_arm64"),
    ]
    release.page(tmp_path)
    text = (tmp_path / "RELEASE.md").read_text()
    assert "\npip install pyattn==1.2.0\n" in text
    assert "Wheels: Linux x86-64, Linux arm64, macOS arm64; Python 3.10, 3.14t. Each needs torch>=2.11,<2.16" in text
    assert "- new" in text
    assert "- old" not in text
    sums = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert sorted(sums, key=lambda line: line.split()[1]) == sums
    assert {line.split()[1]: line.split()[0] for line in sums} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made
    }


def test_files_of_another_version_are_refused(release: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must have wheels, got none$"):
        release.page(tmp_path)
    wheel(tmp_path, "cp310-cp310-macosx_14_0_arm64")
    wheel(tmp_path, "cp310-cp310-macosx_14_0_arm64", "1.1.0")
    with pytest.raises(SystemExit, match=r"all files must be of version 1\.2\.0, got pyattn-1\.1\.0-cp310"):
        release.page(tmp_path)
