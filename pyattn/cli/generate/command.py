"""``pyattn generate``: let a trained model continue a text.

Reads a checkpoint of ``pyattn train`` and prints the prompt and the model's continuation, byte by byte. Each step reads
one byte over a cache of the keys and values so far. A model with learned positions stops at its context; one trained
with --alibi continues. Ctrl-C also stops.

With --draft, a smaller model guesses the next bytes and the model checks all of them in one call, at any temperature.
The command generates twice, with the draft and without it, and prints how much faster the draft was. On a CPU the text
is the same to the byte; on a GPU, unless two bytes are equally likely to rounding.

With --cache-dtype, the cache holds 8 bits for each number, and the command prints the model's loss over the text, read
from such a cache and from one in the model's dtype.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli import InputError, checkpoint
from pyattn.cli.checks import at_least, check_integer, check_text
from pyattn.cli.generate import drafts, sampling
from pyattn.cli.gpt import GPT
from pyattn.cli.options import Command
from pyattn.ops.row_invariance import row_invariant, set_row_invariant

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
    parser.add_argument("--cache-dtype", choices=sampling.CACHE_DTYPES, help="keep keys and values in 8 bits")
    parser.add_argument("--draft", type=Path, metavar="RUN", help="run of a smaller model that drafts the next bytes")
    most = sampling.CHUNK - 1
    check = partial(check_integer, least=1, most=most, why="a call reads so many, and one byte before them")
    parser.option("draft-tokens", drafts.TOKENS, "bytes of a draft", check)
    return parser.checked(argv)


def draft_for(model: GPT, prompt: int, count: int, options: argparse.Namespace) -> drafts.Drafts:
    """The model of ``--draft``; InputError if it can't draft ``count`` bytes after ``prompt`` others."""
    small, _ = checkpoint.of_run(options.draft, "--draft")
    config = small.config
    if config.vocab != model.config.vocab:
        raise InputError(f"--draft must have the vocabulary of the model, {model.config.vocab}", config.vocab)
    if sampling.room(config, prompt, count) < count:
        rule = f"--draft must have a context of at least {prompt + count} bytes, the prompt and --tokens, or ALiBi"
        raise InputError(rule, config.context)
    sampling.check_caches("--tokens", config, prompt, count, options.device)
    return drafts.Drafts(model, small.to(options.device), options.draft_tokens)


@dataclass
class Written:
    """Bytes that a model wrote, the seconds that they took, and whether Ctrl-C ended them."""

    text: bytearray
    seconds: float
    interrupted: bool


def write(tokens: Iterator[Tensor], count: int) -> Written:
    """Takes up to ``count`` tokens, and shows their number as they come."""
    begin, written = time.perf_counter(), Written(bytearray(), 0.0, False)
    try:
        for token in tqdm(tokens, total=count, unit="tokens", leave=False, disable=None):
            written.text.append(int(token))
    except KeyboardInterrupt:
        written.interrupted = True
    written.seconds = time.perf_counter() - begin
    return written


def compared(ours: Written, plain: Written, drafted: drafts.Drafts) -> str:
    """How a text with a draft compares with that of the same call without one."""
    speed = f"{plain.seconds / ours.seconds:.2f} times as fast as without the draft ({plain.seconds:.1f} s)"
    text = "the same text"
    if ours.text != plain.text:
        at = next(i for i, (a, b) in enumerate(zip(ours.text, plain.text, strict=True)) if a != b)
        text = f"another text from byte {at} on, where two bytes were equally likely to rounding"
    return f"{drafted.accepted} of {drafted.drafted} drafted bytes accepted, {speed}, {text}"


def check_cache_dtype(options: argparse.Namespace) -> None:
    """InputError for options that a cache of 8 bits does not go with."""
    given = {"--no-cache": options.no_cache, "--draft": options.draft, "--device cuda": options.device != "cpu"}
    for name, value in given.items():
        if value:
            raise InputError(f"--cache-dtype must come without {name}", options.cache_dtype)


def losses(model: GPT, text: Sequence[int], name: str) -> str:
    """How the model's loss over a text compares between a cache of 8 bits and one in its dtype."""
    ids = torch.tensor([list(text)])
    eight, own = (sampling.loss(model, ids, kv_dtype) for kv_dtype in (sampling.CACHE_DTYPES[name], None))
    return f"loss over these {len(text)} bytes: {eight:.4f} from a cache of {name}, {own:.4f} from the model's dtype"


def exact(model: GPT, prompt: int, count: int, options: argparse.Namespace) -> bool:
    """Whether the text must not depend on how many bytes share a call: on a CPU with a draft, or where it costs little.

    Without a draft, a ring buffer, which invariant rows do not have, keeps its lower memory, and 8 bits their speed.
    """
    if options.device != "cpu" or options.draft is not None:
        return bool(options.device == "cpu")
    ring = sampling.cache_size(model.config, prompt + count)[0] is not None
    return not ring and options.cache_dtype is None


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
    count = sampling.room(model.config, len(prompt), options.tokens)
    with set_row_invariant(row_invariant() or exact(model, len(prompt), count, options)):
        return written(model, prompt, count, options)


def written(model: GPT, prompt: bytes, count: int, options: argparse.Namespace) -> int:
    """Generates ``count`` bytes after ``prompt`` and prints them. Returns the exit code."""
    context = model.config.context
    if not options.no_cache:
        sampling.check_caches("--tokens", model.config, len(prompt), count, options.device)
    elif options.draft is not None:
        raise InputError("--draft needs a cache", "--no-cache")
    if options.cache_dtype is not None:
        check_cache_dtype(options)
    drafted = None if options.draft is None else draft_for(model, len(prompt), count, options)
    ids = torch.tensor([list(prompt)], device=options.device)
    plain = partial(sampling.sampled, model, ids, count, options, not options.no_cache)
    drawing = sampling.drawing(options)
    ours = write(plain() if drafted is None else drafted.continuation(ids, count, **drawing), count)

    print((prompt + ours.text).decode(errors="replace"))
    if len(ours.text) == count < options.tokens:
        print(f"stopped at the context of {context} bytes, where learned positions end", file=sys.stderr)
    rate = f", {len(ours.text) / ours.seconds:,.0f} tokens/s" if ours.text else ""
    print(f"{len(ours.text)} bytes after {len(prompt)} in {ours.seconds:.1f} s{rate}", file=sys.stderr)
    interrupted = ours.interrupted
    if options.cache_dtype is not None and len(prompt) + len(ours.text) > 1 and not interrupted:
        print(losses(model, [*prompt, *ours.text], options.cache_dtype), file=sys.stderr)
    if drafted is not None and count and not interrupted:
        without = write(plain(), count)
        interrupted = without.interrupted
        if not interrupted:
            print(compared(ours, without, drafted), file=sys.stderr)
    return 130 if interrupted else 0
