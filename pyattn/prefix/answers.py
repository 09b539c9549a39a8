"""Answers to the same prompt as heads of one sequence, whose keys are the prompt's."""

from typing import NamedTuple

from torch import Tensor

from pyattn.options.axes import AXES, dims_of
from pyattn.options.checks import has_values
from pyattn.options.schema import Options


class Answers(NamedTuple):
    """How many prompts there are, answers to ``each``, KV heads, and query heads of a KV head."""

    prompts: int
    each: int
    num_heads_kv: int
    group: int

    @classmethod
    def of(cls, q: Tensor, prompts: int, num_heads_kv: int) -> "Answers":
        """The answers with the queries q (B, Hq, ...)."""
        return cls(prompts, len(q) // max(1, prompts), num_heads_kv, q.shape[1] // max(1, num_heads_kv))

    def stacked(self, tensor: Tensor) -> Tensor:
        """(B, Hq, ...) -> (G, Hkv * n * group, ...): answers as heads, next to those that read the same KV head."""
        rest = tensor.shape[2:]
        apart = tensor.reshape(*self, *rest).transpose(1, 2)
        return apart.reshape(self.prompts, self.num_heads_kv * self.each * self.group, *rest)

    def unstacked(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`stacked`."""
        rest = tensor.shape[2:]
        apart = tensor.reshape(self.prompts, self.num_heads_kv, self.each, self.group, *rest).transpose(1, 2)
        return apart.reshape(self.prompts * self.each, self.num_heads_kv * self.group, *rest)

    def split(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Views for the first answer to each prompt, the second and so on; ``dim`` counts from the last dimension.

        unbind's backward writes each gradient once.
        """
        at = tensor.dim() + dim
        parts: tuple[Tensor, ...] = tensor.unflatten(at, self[:2]).unbind(at + 1)
        return parts

    def one_of_each(self, tensor: Tensor, dim: int) -> Tensor | None:
        """The values for one answer to each prompt, if all its answers are known to have the same ones."""
        if not (tensor.is_cpu and has_values(tensor)):
            return None
        at = tensor.dim() + dim
        apart = tensor.unflatten(at, self[:2])
        first = apart.narrow(at + 1, 0, 1)
        return first.squeeze(at + 1) if bool((apart == first).all()) else None


def as_heads(options: Options, answers: Answers, length: int) -> Options | None:
    """The options for :meth:`Answers.stacked` queries over prompts of ``length`` keys.

    None if heads can't have them: what differs between answers to one prompt, as the origins of dropout's draws do.
    """
    by_distance = options.window[0] >= 0 or options.alibi_slopes is not None or options.relative_bias is not None
    if options.q_offsets is not None and not by_distance:  # after the prompt, all positions see all of it
        options = options._replace(q_offsets=options.q_offsets.clamp(max=length))
    changed: dict[str, Tensor] = {}
    for name in AXES:
        tensor = getattr(options, name)
        if not isinstance(tensor, Tensor):
            continue
        dims = dims_of(AXES[name], tensor)
        if name in ("alibi_slopes", "relative_bias"):
            if "b" in dims or "h" in dims:
                columns = tensor.shape[-1:] if name == "relative_bias" else ()
                batch, heads = answers.prompts * answers.each, answers.num_heads_kv * answers.group
                whole = answers.stacked(tensor.expand(batch, heads, *columns))
                changed[name] = whole if "b" in dims else whole[0]
        elif "h" in dims or "g" in dims or (name == "bias" and "b" in dims):
            return None
        elif "b" in dims:
            one = answers.one_of_each(tensor, dims["b"])
            if one is None:
                return None
            changed[name] = one
    found: Options = options._replace(**changed)
    return found
