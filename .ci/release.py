"""The statements of a release: its version, the hashes of its files, and its page.

python release.py version       checks that all places name one version, and prints it
python release.py page FOLDER   writes FOLDER/SHA256SUMS and FOLDER/RELEASE.md, and prints the manifest
"""

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS = {"manylinux.*x86_64": "Linux x86-64", "manylinux.*aarch64": "Linux arm64", "macosx.*arm64": "macOS arm64"}
"""Systems by the platform tags of their wheels; the plain tag linux_* is that of a wheel that is not repaired."""


def found(pattern: str, file: str) -> str:
    """The first group of the pattern in a file of the repository."""
    match = re.search(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        sys.exit(f"release: {file} must have {pattern}, which is not there")
    return match[1]


def version() -> str:
    """The version; ends the program unless package, changelog and tag agree on it."""
    named = {
        "pyproject.toml": found(r'^version = "(.+)"$', "pyproject.toml"),
        "pyattn/__init__.py": found(r'^__version__ = "(.+)"$', "pyattn/__init__.py"),
        ".github/CHANGELOG.md": found(r"^## (\S+)", ".github/CHANGELOG.md"),
    }
    tags = subprocess.check_output(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, text=True).split()
    named |= {f"the tag {tag}": tag[1:] for tag in tags}
    if len(set(named.values())) != 1:
        sys.exit(f"release: all places must name one version, got {named}")
    here = named["pyproject.toml"]
    if tags and found(rf"^## {re.escape(here)} \((.+)\)$", ".github/CHANGELOG.md") == "unreleased":
        sys.exit(f"release: the changelog must have the date of {here}, which is tagged, got (unreleased)")
    return here


def changes() -> str:
    """The newest part of the changelog, without its heading."""
    return found(r"(?s)^## [^\n]+\n(.+?)(?=^## |\Z)", ".github/CHANGELOG.md").strip()


def requirement(wheel: Path) -> str:
    """The wheel's requirement on torch."""
    with zipfile.ZipFile(wheel) as content:
        metadata = next(name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        lines = content.read(metadata).decode().splitlines()
    return next(line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: torch"))


def page(folder: Path) -> None:
    """Writes the hashes and the page of the release whose files are in the folder."""
    here = version()
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    wheels = [path for path in files if path.suffix == ".whl"]
    if not wheels:
        sys.exit(f"release: {folder} must have wheels, got none")
    if other := [path.name for path in files if path.name.split("-")[1].removesuffix(".tar.gz") != here]:
        sys.exit(f"release: all files must be of version {here}, got {' '.join(other)}")
    hashes = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {path.name}\n" for path, digest in hashes.items()))

    systems = [name for tag, name in SYSTEMS.items() if any(re.search(tag, path.name) for path in wheels)]
    abis = {re.search(r"-cp3(\d+t?)-[^-]+$", path.name)[1] for path in wheels}  # type: ignore[index]
    pythons = sorted(abis, key=lambda abi: (int(abi.rstrip("t")), abi))  # 14t: free-threaded
    where = f"{', '.join(systems) or 'this machine alone'}; Python {', '.join(f'3.{minor}' for minor in pythons)}"
    torches = " or ".join(sorted({requirement(path) for path in wheels}))
    rows = "".join(f"| {path.name} | {path.stat().st_size:,} | `{digest}` |\n" for path, digest in hashes.items())
    (folder / "RELEASE.md").write_text(
        f"# pyattn {here}\n\n```sh\npip install pyattn=={here}\n```\n\n"
        f"Wheels: {where}. Each needs {torches}, which pip installs if the environment has none. On Linux, that is the "
        f"build with CUDA; install torch's CPU build first if you want that one.\n\n"
        f"{changes()}\n\n| file | bytes | SHA-256 |\n|---|---|---|\n{rows}"
    )
    print(f"pyattn {here}: {where}")
    for path, digest in hashes.items():
        print(f"{digest}  {path.stat().st_size:>10,}  {path.name}")
        if path in wheels:
            print(f"{'':64}  requires {requirement(path)}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["version"]:
            print(version())
        case ["page", folder]:
            page(Path(folder))
        case _:
            sys.exit(__doc__)
