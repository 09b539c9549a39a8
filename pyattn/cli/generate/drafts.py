"""Speculative decoding: a small model drafts the next tokens, and the large one checks all of them in one call.

::

    text     ... t              t is the last token, which no cache holds yet
    draft    d1 d2 d3           the small model continues t
    check    c1 c2 c3 c4        the large model reads t d1 d2 d3 in one call and chooses a token after each
    taken    c1 .. cn           up to the first that differs from the draft; both caches take back the others

The large model chooses each token from its own logits, with the random number that it would draw without a draft. So
the text is the same at any temperature, as long as rounding does not decide. With :func:`pyattn.set_row_invariant` it
does not: attention over several tokens has the bits of calls of one token, and the other layers take the tokens one by
one. Without it, as on a GPU, a call of several tokens sums in another order than a call of one, so two tokens whose
logits differ by about 1e-5 may swap. The small model draws its guesses with the same random numbers, so models that
agree choose alike.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1. There, the
large model accepts a draft with a probability; here, it draws the token itself and compares.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from pyattn.cli.generate import sampling
from pyattn.cli.generate.sampling import Cached
from pyattn.cli.gpt import GPT, all_tokens, token_by_token
from pyattn.ops.row_invariance import row_invariant

TOKENS = 4
"""Tokens of a draft. If the large model takes a share a of the tokens and the small model's step costs c of the large
one's, n tokens are (1 - a^(n + 1)) / ((1 - a) (1 + c n)) times as fast (Leviathan et al., theorem 3.8): for a = 0.8 and
c = 0.15, 2.1 times with 4 to 6."""


class Drafts:
    """Continuations that ``model`` writes with drafts of up to ``tokens`` tokens by ``small``.

    Attributes:
        drafted, accepted: how many tokens ``small`` has drafted, and how many of these ``model`` has chosen too.
    """

    def __init__(self, model: GPT, small: GPT, tokens: int) -> None:
        self.model: GPT = model
        self.small: GPT = small
        self.tokens: int = tokens
        self.drafted: int = 0
        self.accepted: int = 0

    @torch.no_grad()
    def continuation(
        self, ids: Tensor, count: int, generator: torch.Generator, *, temperature: float, top_k: int
    ) -> Iterator[Tensor]:
        """Yields ``count`` tokens (1, 1) that follow ``ids`` (1, S): those of :func:`generation.continuation`."""
        if not count:
            return
        choose = partial(sampling.choose, temperature=temperature, top_k=top_k)
        large, small = (Cached(model, 1, ids.shape[1] + count) for model in (self.model, self.small))
        yield (token := choose(large(ids), generator=generator))
        unread, left = torch.cat([ids, token], 1), count - 1
        while left:
            draft, ahead = unread[:, :0], torch.Generator().set_state(generator.get_state())
            while draft.shape[1] < min(self.tokens, left - 1):
                draft = torch.cat([draft, choose(small(unread), generator=ahead)], 1)
                unread = draft[:, -1:]
            known = large.done + 1  # the text so far, `token` included
            logits = large.logits(torch.cat([token, draft], 1), token_by_token if row_invariant() else all_tokens)
            for taken in range(draft.shape[1] + 1):
                token = choose(logits[:, taken], generator=generator)
                yield token
                if taken == draft.shape[1] or not torch.equal(token, draft[:, taken : taken + 1]):
                    break
            left -= taken + 1
            self.drafted, self.accepted = self.drafted + draft.shape[1], self.accepted + taken
            large.forget(known + taken)
            small.forget(min(small.done, known + taken))
            unread = torch.cat([draft[:, small.done - known : taken], token], 1)
