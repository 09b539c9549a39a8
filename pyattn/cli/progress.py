"""Progress of training: a bar on a terminal, and a line for each validation."""

import sys
import time
from types import TracebackType

from tqdm import tqdm  # type: ignore[import-untyped]

from pyattn.cli.contention import SpinNotice


class Progress:
    """Shows ``steps`` steps of ``tokens`` tokens each, by ``threads`` CPU threads (0 on a GPU), from step ``done`` on.

    The bar shows the speed. In a log, which has no bar, each line shows it: tokens a second since the line before,
    validation itself not counted.
    """

    def __init__(self, steps: int, tokens: int, threads: int, done: int = 0) -> None:
        self.tokens, self.notice = tokens, SpinNotice(threads)
        self.bar = tqdm(total=steps * tokens, initial=done * tokens, unit="tokens", unit_scale=True, disable=None)
        self.lines_show_speed = self.bar.disable or not sys.stdout.isatty()
        self.steps, self.seconds = 0, 0.0
        self.resumed = time.perf_counter()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.close()

    def validated(self, step: int, loss: float) -> None:
        """Show the validation loss after ``step`` steps."""
        speed = f"  {self.steps * self.tokens / self.seconds:,.0f} tokens/s" if self.steps else ""
        self.bar.write(f"step {step:5}  validation loss {loss:.4f}{speed if self.lines_show_speed else ''}")
        self.steps, self.seconds = 0, 0.0
        self.resumed = time.perf_counter()

    def stepped(self, loss: float) -> None:
        """Count a step, whose training loss is ``loss``."""
        now = time.perf_counter()
        self.steps, self.seconds, self.resumed = self.steps + 1, self.seconds + now - self.resumed, now
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update(self.tokens)
        if sentence := self.notice.look():
            self.bar.write(sentence)
