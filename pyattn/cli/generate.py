"""``pyattn generate``: let a trained model continue a text.

Reads a checkpoint of ``pyattn train`` and prints the prompt and the model's continuation, byte by byte. Each step reads
one byte over a cache of the keys and values so far. A model with learned positions stops at its context; one trained
with --alibi continues. Ctrl-C also stops.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli import InputError, checkpoint, generation
from pyattn.cli.limits import at_least, check_text
from pyattn.cli.options import Command

PROMPT = "def mean(numbers):\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options."""
    parser = Command("generate", __doc__)
    parser.add_argument("run", type=Path, help=f"folder that pyattn train wrote, or its {checkpoint.MODEL}")
    parser.add_argument("--prompt", default=PROMPT, help="text to continue; default: the beginning of a function")
    parser.option("tokens", 400, "bytes to add", at_least(0))
    parser.sampling("")
    parser.place("where to compute")
    parser.add_argument("--no-cache", action="store_true", help="read the whole text again for each byte, to compare")
    return parser.checked(argv)


def run(argv: Sequence[str]) -> int:
    """Read the model and the prompt, generate, print. Returns the exit code."""
    options = parse(argv)
    prompt = check_text("--prompt", options.prompt)
    if not prompt:
        raise InputError("--prompt must have at least 1 byte", 0)
    torch.set_num_threads(options.threads)
    model, _ = checkpoint.of_run(options.run)
    model = model.to(options.device)
    context = model.config.context
    if model.position is not None and len(prompt) > context:
        raise InputError(f"--prompt must have at most {context} bytes, the model's context", len(prompt))
    count = generation.room(model.config, len(prompt), options.tokens)
    if not options.no_cache:
        generation.check_caches("--tokens", model.config, len(prompt), count, options.device)
    ids = torch.tensor([list(prompt)], device=options.device)
    tokens = generation.sampled(model, ids, count, options, not options.no_cache)

    begin, interrupted, added = time.perf_counter(), False, bytearray()
    try:
        for token in tqdm(tokens, total=count, unit="tokens", leave=False, disable=None):
            added.append(int(token))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.perf_counter() - begin

    print((prompt + added).decode(errors="replace"))
    if len(added) == count < options.tokens:
        print(f"stopped at the context of {context} bytes, where learned positions end", file=sys.stderr)
    rate = f", {len(added) / seconds:,.0f} tokens/s" if added else ""
    print(f"{len(added)} bytes after {len(prompt)} in {seconds:.1f} s{rate}", file=sys.stderr)
    return 130 if interrupted else 0
