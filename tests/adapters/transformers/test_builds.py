"""Promise: a model that can't run with this attention says so when it is built, or when its attention is switched.

Also the keywords: a release of transformers whose models pass a new argument to attention fails here.
"""

import ast
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModel, PreTrainedModel

from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import attention_function
from pyattn.adapters.transformers.models import CONFIGURATIONS, own_attention

(MODELS,) = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
REFUSED: dict[str, dict[str, Any]] = {
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "Falcon": SMALL,
    "GPTNeo": {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
    | {"num_heads": 4},
    "Git": SMALL,
    "MPNet": SMALL,
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "XGLM": {"vocab_size": 64, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48},
}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "mlp_dim": 48}
SAM = {
    "vision_config": VISION | {"image_size": 32, "output_channels": 32, "global_attn_indexes": [0], "num_pos_feats": 16}
}
SAM |= {"prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "mask_input_channels": 4}}
SAM |= {"mask_decoder_config": {"hidden_size": 32, "mlp_dim": 48, "num_attention_heads": 4, "iou_head_hidden_dim": 32}}


def configured(name: str, arguments: dict[str, Any]) -> Any:
    adapter.register()
    return getattr(transformers, f"{name}Config")(**arguments)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_when_it_is_built(name):
    """Not at its first mask, nor by KeyError: 'pyattn' from its own table."""
    config = configured(name, REFUSED[name])
    message = r"^pyattn: attn_implementation must be \"eager\" for a model with its own attention, got 'pyattn' for "
    with pytest.raises(NotImplementedError, match=message + f"{name}Model"):
        AutoModel.from_config(config, attn_implementation="pyattn")
    AutoModel.from_config(configured(name, REFUSED[name]), attn_implementation="eager")


def test_image_encoders_keep_their_own_attention():
    """SAM's encoder takes its class from a table; the decoder requests attention. Results are those of eager."""
    torch.manual_seed(0)
    model = AutoModel.from_config(configured("Sam", SAM), attn_implementation="pyattn").eval()
    assert model.vision_encoder.config._attn_implementation == "eager"
    assert model.mask_decoder.config._attn_implementation == "pyattn"
    lines = adapter.fallbacks(model)
    assert any(line.startswith("vision_encoder (SamVisionEncoder): attn_implementation is eager") for line in lines)
    assert any(line.endswith("(SamVisionAttention): its own attention") for line in lines)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": torch.rand(1, 1, 2, 2) * 32}
    found = model(**inputs).pred_masks
    model.set_attn_implementation("eager")
    truth = model(**inputs).pred_masks
    model.set_attn_implementation("pyattn")
    assert model.vision_encoder.config._attn_implementation == "eager"
    assert torch.equal(model(**inputs).pred_masks, found)
    assert (found - truth).abs().max() <= 2**-13 * truth.abs().max()


def test_a_whole_encoder_that_needs_no_mask_says_eager():
    model = AutoModel.from_config(configured("Swinv2", {"embed_dim": 8, "depths": [1], "num_heads": [2]}))
    assert model.config._attn_implementation == "eager"
    model = AutoModel.from_config(model.config, attn_implementation="pyattn")
    assert model.config._attn_implementation == "eager"
    assert any("attn_implementation is eager" in line for line in adapter.fallbacks(model))


def test_the_check_is_installed_once_and_is_about_this_name_alone():
    adapter.register()
    check = PreTrainedModel.get_correct_attn_implementation
    adapter.register()
    assert PreTrainedModel.get_correct_attn_implementation is check
    with pytest.raises(ValueError, match='Specified `attn_implementation="nothing"` is not supported'):
        AutoModel.from_config(configured("Bloom", REFUSED["Bloom"]), attn_implementation="nothing")


def calls(code: str) -> list[ast.Call]:
    """The calls of what ``get_interface`` returned in a module."""
    nodes = [*ast.walk(ast.parse(code))]
    names = set()
    for node in nodes:
        call = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("get_interface"):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target) for target in targets}
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


WITHOUT_EFFECT = {
    "deterministic",  # of flash-attention's backward
}


def test_every_keyword_of_every_model_is_known():
    """Reads the source of every model. A tensor of an unknown name would fail at the first forward pass."""
    known = inspect.signature(attention_function).parameters.keys() - {"named"} | WITHOUT_EFFECT
    unknown: dict[str, list[str]] = {}
    count = 0
    for path in sorted(Path(MODELS).glob("models/*/modeling_*.py")):
        code = path.read_text(encoding="utf-8")
        if "get_interface(" in code:
            found = calls(code)
            assert found, path
            count += len(found)
            names = {keyword.arg for call in found for keyword in call.keywords} - {None} - known
            for name in names:
                unknown.setdefault(str(name), []).append(path.stem)
    assert count > 300
    assert not unknown


def test_the_tables_of_classes_are_known():
    """A table that is looked up with the implementation's name raises KeyError for ours."""
    for path in sorted(Path(MODELS).glob("models/*/modeling_*.py")):
        code = path.read_text(encoding="utf-8")
        tables = {
            ast.unparse(node.value)
            for node in ast.walk(ast.parse(code) if "_CLASSES" in code else ast.Module([], []))
            if isinstance(node, ast.Subscript) and "attn_implementation" in ast.unparse(node.slice)
        }
        if any(table.endswith("ATTENTION_CLASSES") for table in tables):
            own = own_attention(path)
            assert own.classes, path
            assert not own.asks or any(kind in code for kind in CONFIGURATIONS), path
