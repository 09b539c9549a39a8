"""The check that transformers makes of ``attn_implementation`` when a model is built, and at each switch.

transformers accepts every registered name there, also for models that do not ask it for an attention function: such a
model fails at its first mask, or looks for the name in its own table and raises KeyError.
"""

import functools
import sys
from typing import Any

from pyattn.adapters.transformers import models

_ASKING = "create_"
"""How the names of transformers' functions for masks begin."""


def install(implementation: str) -> None:
    """Lets ``PreTrainedModel.get_correct_attn_implementation`` refuse this name where no attention would be ours.

    Models whose masks come from transformers can't run and are refused. Others, such as image encoders and Gemma 4's
    audio encoder, stay with their own attention: their configuration says "eager", as
    :func:`pyattn.adapters.transformers.fallbacks` shows.
    """
    from transformers import PreTrainedModel

    check = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "refuses", None) == implementation:
        return

    @functools.wraps(check)
    def checked(model: Any, requested_attention: str | None, *arguments: Any, **named: Any) -> str:
        own = models.keeps_its_own(type(model.config))
        if requested_attention == implementation and (own or models.blocks_masks(type(model.config))):
            if own and _asks_for_masks(type(model)):
                raise NotImplementedError(
                    f'pyattn: attn_implementation must be "eager" for a model with its own attention, got '
                    f"{implementation!r} for {type(model).__name__}"
                )
            requested_attention = "eager"
        found: str = check(model, requested_attention, *arguments, **named)
        return found

    checked.refuses = implementation  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked


def _asks_for_masks(kind: type) -> bool:
    """Whether the module that defines a model uses transformers' functions for masks."""
    from transformers import masking_utils

    module = vars(sys.modules[kind.__module__])
    return any(name.startswith(_ASKING) and name in module for name in vars(masking_utils))
