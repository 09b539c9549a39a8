"""The name of this implementation in transformers' tables, and what it does not reach."""

import inspect

from torch import nn

from pyattn.adapters.transformers import builds, masks, models, packed, position_bias
from pyattn.adapters.transformers.attention import attention_function
from pyattn.adapters.transformers.masks import mask_function

NAME = "pyattn"
"""The value of ``attn_implementation``."""


def register() -> None:
    """Makes ``attn_implementation="pyattn"`` known to transformers, for attention and masks alike.

    Nothing else changes: models with another ``attn_implementation`` run as before. A second call has no effect.
    Models with their own attention, such as GPT-Neo and Falcon, are then refused with NotImplementedError when they
    are built with this name; parts that need no mask, such as SAM's image encoder, stay with "eager".

    Raises:
        ImportError: transformers is missing, or older than 5.6, which calls mask functions differently.
    """
    needed = 'pyattn: register() needs transformers 5.6 or later (pip install "transformers>=5.6")'
    try:
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
    except ImportError as error:
        raise ImportError(f"{needed}, got {error}") from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(f"{needed}, got {transformers.__version__}")
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    position_bias.install(NAME)
    builds.install(NAME)


def fallbacks(model: nn.Module | None = None) -> list[str]:
    """Reports what did not run in linear memory, and which parts of a model do not run here at all.

    Args:
        model: a model of transformers; default: report masks only.

    Returns:
        First, a line for each reason why a mask of queries x keys was made since the process began, with the count;
        such calls still run here. Then a line for each part of ``model`` whose attention is its own or another
        implementation's: a model may have such parts beside others, and its configuration says "eager" for some.
        transformers' own models are known by their source, other people's by what they have called, uncompiled, so run
        them first. Then the calls in which documents packed into a row saw each other, or may have; tokens that
        continue a cache of packed documents see all of them, and are not counted. Empty if there is nothing to report.
    """
    lines = [f"{count} masks of queries x keys: {why}" for why, count in sorted(masks.DENSE.items())]
    if model is not None:
        lines += models.fallbacks(model, NAME)
    return lines + packed.fallbacks(model)
