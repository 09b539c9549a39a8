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
from pyattn.cli.limits import check_integer, check_positive, check_seed, check_text, check_threads
from pyattn.cli.options import DEVICES, check_device, command, option

PROMPT = "def mean(numbers):\n"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = command("generate", __doc__)
    parser.add_argument("run", type=Path, help=f"folder that pyattn train wrote, or its {checkpoint.MODEL}")
    parser.add_argument("--prompt", default=PROMPT, help="text to continue; default: the beginning of a function")
    option(parser, "tokens", 400, "bytes to add")
    option(parser, "temperature", 0.8, "divides the logits: lower is less random, 0 takes the likeliest byte")
    option(parser, "top-k", 40, "draw from the K likeliest bytes")
    option(parser, "seed", 0, "random seed")
    option(parser, "threads", torch.get_num_threads(), "CPU threads")
    option(parser, "device", "cpu", "where to compute", choices=DEVICES)
    parser.add_argument("--no-cache", action="store_true", help="read the whole text again for each byte, to compare")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> bytes:
    """Raise InputError for the first invalid value; returns the prompt's bytes."""
    check_integer("--tokens", options.tokens, 0)
    check_integer("--top-k", options.top_k, 1)
    check_threads(options.threads)
    check_positive("--temperature", options.temperature, zero=True)
    check_seed(options.seed)
    prompt = check_text("--prompt", options.prompt)
    if not prompt:
        raise InputError("--prompt must have at least 1 byte", 0)
    check_device(options.device)
    return prompt


def run(argv: Sequence[str]) -> int:
    """Read the model and the prompt, generate, print. Returns the exit code."""
    options = parse(argv)
    prompt = check(options)
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
