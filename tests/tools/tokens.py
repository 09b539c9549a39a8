"""Counts the tokens of the rooms at each commit: ``tokens.py [COMMIT...]``, by default in the working tree.

tokenize counts Python, clang's lexer C++ and CUDA. Comments, docstrings and layout are left out, so the number measures
the code that a reader has to follow, not how it is wrapped or explained.
"""

import ast
import io
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOMS = ("csrc", "pyattn", "tests")
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
CLANG = next(filter(None, map(shutil.which, ("clang++-16", "clang++"))), "clang++")


def docstrings(source: str) -> set[tuple[int, int]]:
    """The positions at which docstrings, strings that are statements, begin."""
    return {
        (node.value.lineno, node.value.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def python_tokens(source: str) -> int:
    left_out = docstrings(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT and token.start not in left_out for token in tokens)


def cpp_tokens(files: list[Path]) -> int:
    """The tokens of all the files: a line of the lexer begins with the kind, followed by the token in quotes."""
    if not files:
        return 0
    command = [CLANG, "-std=c++20", "-x", "c++", "-fsyntax-only", "-Xclang", "-dump-raw-tokens"]
    total = 0
    for file in files:
        lines = subprocess.run([*command, file], capture_output=True, text=True, check=True).stderr.splitlines()
        kinds = (line.split(maxsplit=1)[0] for line in lines if "\tLoc=<" in line or " Loc=<" in line)
        total += sum(kind not in ("unknown", "comment", "eof") for kind in kinds)
    return total


def count(root: Path) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for room in ROOMS:
        files = [path for path in (root / room).rglob("*") if "records" not in path.parts]
        sources = [path for path in files if path.suffix == ".py"]
        tokens[room] = sum(python_tokens(path.read_text()) for path in sources)
        tokens[room] += cpp_tokens([path for path in files if path.suffix in (".h", ".cpp", ".cu")])
    return tokens


def main() -> int:
    root = Path(__file__).parents[2]
    for commit in sys.argv[1:] or [""]:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            listing = ["git", "-C", str(root), "archive", commit or "HEAD", *ROOMS]
            if commit:
                subprocess.run(["tar", "-x", "-C", folder], input=subprocess.check_output(listing), check=True)
            counted = count(tree if commit else root)
        both = counted["csrc"] + counted["pyattn"]
        print(f"{commit or 'now':10} csrc {counted['csrc']:,} + pyattn {counted['pyattn']:,} = {both:,}"
              f", tests {counted['tests']:,}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
