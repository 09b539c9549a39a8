"""Models with attention written out, plain, compiled, converted, and with ``attention`` called: prints Markdown tables.

    python tests/tools/scratch_speed.py [layer] [model] [left]

``layer``: the book's, 768 wide, 12 heads, forward, training step and its peak memory. ``model``: two blocks of it with
feed-forward layers and AdamW, 1,000 words, a whole training step. ``left``: layers whose products are no attention that
is recorded, converted beside plain, which should take at most 1.05 of the time. One thread, thread time, medians of
rounds in turn; ratios are medians of those within a round.
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyattn import attention
from pyattn.adapters import scratch
from pyattn.adapters.scratch import graphs
from pyattn.cli.timing import Time, in_turn, peak_memory
from tests.support.adapters.written import Attention

SIZES = ((2, 64), (16, 64), (4, 128), (4, 256), (2, 512), (2, 1024), (1, 2048))
"""Batch and length. The first has too few scores to be recorded."""

WIDTH, HEADS, WORDS = 768, 12, 1000
SECONDS = 2.5
"""A side's share of a comparison; at least five rounds."""

Calls = dict[str, Callable[[], object]]


class Direct(Attention):
    """The same layer, by one call of pyattn."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        linears = (self.W_query, self.W_key, self.W_value)
        q, k, v = (linear(x).view(b, t, self.num_heads, -1).transpose(1, 2) for linear in linears)
        out = attention(q, k, v, causal=True, dropout_p=self.dropout.p if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend, self.norms = attend, nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.ff = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.ff(self.norms[1](x))


def gpt(kind: type[Attention], seqlen: int, dropout: float) -> nn.Module:
    """Two blocks between an embedding and logits."""
    torch.manual_seed(0)
    blocks = [Block(kind(WIDTH, seqlen, HEADS, dropout)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def sides_of(make: Callable[[type[Attention]], nn.Module]) -> dict[str, nn.Module]:
    """Every way to run one model."""
    plain = make(Attention)
    compiled, ours = (copy.deepcopy(plain) for _ in range(2))
    return {
        "plain": plain,
        "compiled": torch.compile(compiled, dynamic=False),
        "converted": scratch.convert(copy.deepcopy(plain)),
        "backend pyattn": torch.compile(ours, backend=graphs.backend, dynamic=False),
        "direct": make(Direct),
    }


def forward(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """The module's result, without a gradient."""

    def call() -> Tensor:
        with torch.no_grad():
            out: Tensor = module(x)
        return out

    return call


def step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward of a layer, the input's gradient included."""
    x = x.clone().requires_grad_()

    def call() -> None:
        module.zero_grad()
        x.grad = None
        module(x).sum().backward()

    return call


def training(module: nn.Module, words: Tensor) -> Callable[[], object]:
    """A whole training step."""
    optimizer = torch.optim.AdamW(module.parameters())

    def call() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()

    return call


def timed(calls: Calls) -> tuple[dict[str, Time], dict[str, int | None]]:
    """Times in turn, and the peak memory of one call each."""
    for call in calls.values():
        for _ in range(2):
            call()
    return in_turn(calls, "plain", SECONDS, fewest=5), {name: peak_memory(call) for name, call in calls.items()}


def row(name: str, calls: Calls, *, memory: bool) -> str:
    """A row: the plain time, the speed-up of each other side, and the peak of each."""
    torch.compiler.reset()
    times, peaks = timed(calls)
    cells = [name, f"{times['plain'].seconds * 1e3:.1f}"]
    cells += [f"{times[side].speedup:.2f}" for side in calls if side != "plain"]
    if memory:
        cells += ["-" if peak is None else f"{peak / 1e6:.0f}" for peak in peaks.values()]
    return "| " + " | ".join(cells) + " |"


def header(first: str, calls: list[str], *, memory: bool) -> str:
    """The table's first two lines."""
    cells = [first, "plain, ms", *(f"plain / {side}" for side in calls if side != "plain")]
    cells += [f"{side}, MB" for side in calls] if memory else []
    return "| " + " | ".join(cells) + " |\n" + "|---" * len(cells) + "|"


NAMES = ["plain", "compiled", "converted", "backend pyattn", "direct"]


def layers() -> None:
    """The layer's tables."""
    for name, make in (("forward", forward), ("training step", step)):
        print(f"\nA layer, {name}\n\n" + header("B x T, dropout", NAMES, memory=True), flush=True)
        for batch, seqlen in SIZES:
            for dropout in (0.0, 0.1):
                torch.manual_seed(0)
                x = torch.randn(batch, seqlen, WIDTH)
                sides = sides_of(lambda kind, t=seqlen, p=dropout: kind(WIDTH, t, HEADS, p))
                calls = {side: make(module.train(), x) for side, module in sides.items()}
                print(row(f"{batch} x {seqlen}, {dropout:g}", calls, memory=True), flush=True)


def models() -> None:
    """The whole training step's table."""
    print("\nA training step of the model\n\n" + header("B x T, dropout", NAMES, memory=True), flush=True)
    for batch, seqlen in SIZES:
        for dropout in (0.0, 0.1):
            words = torch.randint(WORDS, (batch, seqlen), generator=torch.Generator().manual_seed(0))
            sides = sides_of(lambda kind, t=seqlen, p=dropout: gpt(kind, t, p))
            calls = {side: training(module, words) for side, module in sides.items()}
            print(row(f"{batch} x {seqlen}, {dropout:g}", calls, memory=True), flush=True)


class Left(nn.Module):
    """A layer whose product of queries and keys does something else."""

    def __init__(self, read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.read = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), read

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.read(q / 8, k, v).transpose(1, 2).reshape(b, t, d))


def _top(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    least = scores.topk(32, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


def _returned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.mean()


LEFT: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear attention": lambda q, k, v: functional.elu(q) @ (functional.elu(k).mT @ v),
    "linear attention, scores first": lambda q, k, v: (functional.elu(q) @ functional.elu(k).mT).tril() @ v,
    "no softmax": lambda q, k, v: (q @ k.mT).tril() @ v / q.shape[-2],
    "clamp of scores": lambda q, k, v: (q @ k.mT).clamp(-5, 5).softmax(-1) @ v,
    "clamp of weights": lambda q, k, v: (q @ k.mT).softmax(-1).clamp(0, 0.5) @ v,
    "top-k": _top,
    "relu": lambda q, k, v: (q @ k.mT).relu().square() @ v,
    "normalised by sums": lambda q, k, v: (lambda s: s / s.sum(-1, keepdim=True))((q @ k.mT).sigmoid()) @ v,
    "softmax over queries": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "double softmax": lambda q, k, v: (q @ k.mT).softmax(-1).softmax(-1) @ v,
    "weights read as well": _returned,
    "finite fill": lambda q, k, v: (q @ k.mT).masked_fill(k[..., :1].mT > 0, -10.0).softmax(-1) @ v,
}
"""Code that is left as it is written. In ``weights read as well`` attention is taken, and its weights are computed."""


def left() -> None:
    """Layers that are left, converted beside plain."""
    print("\nCode that is left: converted / plain, time\n")
    print("| layer | B x T | forward | training step | reason |\n|---|---|---|---|---|", flush=True)
    for name, read in LEFT.items():
        for batch, seqlen in ((2, 64), (4, 128), (2, 512)):
            torch.manual_seed(0)
            x = torch.randn(batch, seqlen, WIDTH)
            ratios = []
            scratch.reset_counts()
            for make in (forward, step):
                plain = Left(read)
                converted = scratch.convert(copy.deepcopy(plain))
                times, _ = timed({"plain": make(plain, x), "converted": make(converted, x)})
                ratios.append(f"{1 / times['converted'].speedup:.3f}")
            reasons = ", ".join(scratch.counts().left) or "-"
            print(f"| {name} | {batch} x {seqlen} | {' | '.join(ratios)} | {reasons} |", flush=True)


def main() -> None:
    """The tables that are named, or all."""
    torch.set_num_threads(1)
    for name, table in (("layer", layers), ("model", models), ("left", left)):
        if name in (sys.argv[1:] or (name,)):
            table()


if __name__ == "__main__":
    main()
