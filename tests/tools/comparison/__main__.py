"""Measures everything, and writes the page: ``PYTHONPATH=tests/tools python -m comparison FOLDER``.

results.json and README.md go to FOLDER; with ``--page``, only README.md is made again, from results.json. onnxruntime,
OpenVINO and transformers take part if they are installed. Let nothing else run meanwhile.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from comparison import measure
from comparison.page import page

RESULTS, PAGE = "results.json", "README.md"


def main(argv: list[str]) -> None:
    """Measure unless --page is given, then write the page."""
    parser = argparse.ArgumentParser(prog="comparison", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", action="store_true", help="only make the page again")
    parser.add_argument("--minutes", type=float, default=11.0, help="default: 11; compilers may take a minute more")
    parser.add_argument("--threads", type=int, default=1, help="default: 1")
    parser.add_argument("--dtype", nargs="+", choices=measure.TOLERANCE, default=list(measure.TOLERANCE))
    options = parser.parse_args(argv)
    results = options.folder / RESULTS
    if not options.page:
        torch.set_num_threads(options.threads)
        command = "PYTHONPATH=tests/tools python -m comparison " + " ".join(["FOLDER", *argv[1:]])
        record = measure.measured(command, options.minutes, options.dtype, print)
        options.folder.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(record, indent=1) + "\n")
    (options.folder / PAGE).write_text(page(json.loads(results.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
