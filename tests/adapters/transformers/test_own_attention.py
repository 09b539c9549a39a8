"""Promise: a model with its own attention is refused or listed, whatever its source looks like."""

import copy
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import fresh
from support.adapters.models import CACHE, DECODERS, IDS, PADDING, decoder, made
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pyattn.adapters import transformers as adapter
from pyattn.adapters.transformers import models
from pyattn.adapters.transformers.mask import Mask
from pyattn.adapters.transformers.models import OwnAttention, own_attention
from pyattn.cli import info

WHOLE = {
    "bark": {"BarkSelfAttention"},
    "bloom": {"BloomAttention"},
    "data2vec_vision": {"Data2VecVisionSelfAttention", "Data2VecVisionSdpaSelfAttention"},
    "dinat": {"NeighborhoodAttention"},
    "falcon": {"FalconAttention"},
    "gpt_neo": {"GPTNeoSelfAttention"},
    "hiera": {"HieraMaskUnitAttention"},
    "mra": {"MraSelfAttention"},
    "reformer": {"LSHSelfAttention", "LocalSelfAttention"},
    "tvp": {"TvpAttention"},
    "xlnet": {"XLNetRelativeAttention"},
    "yoso": {"YosoSelfAttention"},
    "zoedepth": {"ZoeDepthMultiheadAttention"},
}
PARTS = {
    "git": {"GitSelfAttention"},
    "janus": {"JanusVQVAEAttnBlock"},
    "longt5": {"LongT5LocalAttention", "LongT5TransientGlobalAttention"},
    "sam": {"SamVisionAttention", "SamVisionSdpaAttention"},
}
NONE = ("bert", "deformable_detr", "gemma3", "llama", "llava", "mamba", "resnet", "rwkv", "t5")
(FOLDER,) = importlib.util.find_spec("transformers").submodule_search_locations  # type: ignore[union-attr]


def of_file(name: str) -> OwnAttention:
    (path,) = Path(FOLDER).glob(f"models/*/modeling_{name}.py")
    return own_attention(path)


def test_the_source_of_a_model_shows_its_own_attention():
    """Softmax in modules and functions, kernels for approximations, classes that extend others."""
    assert {name: of_file(name) for name in WHOLE} == {name: (own, False) for name, own in WHOLE.items()}
    assert {name: of_file(name) for name in PARTS} == {name: (own, True) for name, own in PARTS.items()}
    assert not any(of_file(name).classes for name in NONE)
    assert own_attention(Path(FOLDER, "models", "modeling_none.py")) == (set(), True)


def test_a_file_without_an_attention_function_is_refused_only_if_it_computes_attention():
    """Reads the source of every model, 24 MB: no file is refused whose modules ask for an attention function."""
    files = [*Path(FOLDER).glob("models/*/modeling_*.py")]
    refused = [path for path in files if own_attention(path).classes and not own_attention(path).asks]
    assert len(refused) > len(files) // 10
    assert not any("ALL_ATTENTION_FUNCTIONS" in path.read_text(encoding="utf-8") for path in refused)


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta_v2": ("DebertaV2", SMALL),
    "bloom": ("Bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "mpt": ("Mpt", {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4}),
    "mpnet": ("MPNet", SMALL),
    "roformer": ("RoFormer", SMALL | {"embedding_size": 32}),
    "xglm": ("XGLM", {"vocab_size": 64, "d_model": 32, "num_layers": 1, "attention_heads": 4, "ffn_dim": 48}),
    "git": ("Git", SMALL | {"vision_config": SMALL | {"image_size": 32, "patch_size": 16}}),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", [*OWN, *DECODERS])
def test_the_lists_are_what_models_call(name, monkeypatch):
    """Listed models run without calling the attention function, or are refused before that."""
    calls: list[str] = []

    def counted(module, query, key, value, *_, **__):
        calls.append(type(module).__name__)
        return query.new_zeros(*query.shape[:-1], value.shape[-1]).transpose(1, 2), None

    adapter.register()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "pyattn", counted)
    if name in OWN:
        config = getattr(transformers, f"{OWN[name][0]}Config")(**OWN[name][1])
        model = transformers.AutoModel.from_config(config, attn_implementation="eager")
        assert any("attn_implementation is eager" in line for line in adapter.fallbacks(model))
        model.config._attn_implementation = "pyattn"
    else:
        model = decoder(name)
        model.set_attn_implementation("pyattn")
    refused = name in OWN.keys() - {"deberta_v2"}  # it makes its own mask
    with pytest.raises(NotImplementedError, match="its own attention") if refused else nullcontext():
        model(IDS)
    assert bool(calls) == (name not in OWN)
    lines = adapter.fallbacks(model)
    assert any(line.endswith(": its own attention") for line in lines) == (name in OWN)


def test_a_model_that_is_listed_in_part():
    """transformers accepts the name for all of GIT, whose text model would take None to mean every key."""
    model = made(*OWN["git"])
    with pytest.raises(NotImplementedError, match=r"its own attention, got 'pyattn' for GitForCausalLM"):
        model.set_attn_implementation("pyattn")
    model.config._attn_implementation = "pyattn"
    for mask in (None, PADDING["left"]):
        with pytest.raises(NotImplementedError, match=r"its own attention, got \w+\(\) of a mask"):
            model(IDS, attention_mask=mask)
    assert "(GitSelfAttention): its own attention" in "".join(adapter.fallbacks(model))


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class Mixer(PreTrainedModel):
    """Someone else's model: nothing in its source shows that it computes attention."""

    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config: OwnConfig, use: Callable[[Tensor, Any], Tensor], asks_for_a_mask: bool = True) -> None:
        super().__init__(config)
        self.use, self.asks_for_a_mask = use, asks_for_a_mask

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = None
        if self.asks_for_a_mask:
            mask = create_causal_mask(self.config, x, attention_mask, **{CACHE: None})
        return self.use(x @ x.mT, mask) @ x


USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda scores, mask: scores.exp() if mask is None else (scores + mask).exp(),
    "add in place": lambda scores, mask: scores.add_(mask),
    "where": lambda scores, mask: torch.where(mask, scores, -torch.inf),
    "fill": lambda scores, mask: scores.masked_fill(mask, -torch.inf),
    "product": lambda scores, mask: scores * mask,
    "sdpa": lambda scores, mask: nn.functional.scaled_dot_product_attention(scores, scores, scores, attn_mask=mask),
}
HOLES = PADDING["none"].clone()
HOLES[0, 5] = 0


@pytest.mark.parametrize("padding", [None, PADDING["left"], HOLES], ids=["none", "left", "holes"])
@pytest.mark.parametrize("use", USES)
def test_a_mask_is_known_by_its_type(use, padding):
    adapter.register()
    model = Mixer(OwnConfig(attn_implementation="pyattn"), USES[use])
    with pytest.raises(NotImplementedError, match=r"^pyattn: .* its own attention, got \w+\(\) of a mask"):
        model(torch.randn(2, IDS.shape[1], 8), padding)


def test_a_mask_has_no_attributes_of_a_tensor():
    """``mask.dtype`` says why it fails; ``hasattr``, copies and pickles work as for any object."""
    adapter.register()
    model = Mixer(OwnConfig(attn_implementation="pyattn"), lambda scores, mask: scores + mask.repeat(1, 4, 1, 1))
    with pytest.raises(NotImplementedError, match=r"^pyattn: .* its own attention, got \.repeat of a mask"):
        model(torch.randn(2, IDS.shape[1], 8), PADDING["left"])
    mask = Mask((1, 1, 2, 2), pairs=torch.ones(1, 1, 2, 2, dtype=torch.bool))
    assert not hasattr(mask, "dtype")
    for other in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (other.shape, other.first) == (mask.shape, 0)
        assert torch.equal(other.pairs, mask.pairs)


def test_other_peoples_models_are_listed_by_what_they_call():
    adapter.register()
    x = torch.randn(2, 6, 8)
    model = Mixer(OwnConfig(attn_implementation="pyattn"), lambda scores, mask: scores.softmax(-1), False)
    model(x)
    assert adapter.fallbacks(model)[-1] == "the model (Mixer): it has not called the attention function so far"

    class Asking(nn.Module):
        is_causal = True

        def forward(self, x, mask):
            attention = ALL_ATTENTION_FUNCTIONS["pyattn"]
            return attention(self, x[:, None], x[:, None], x[:, None], mask)[0][:, :, 0]  # type: ignore[no-any-return]

    layer = Asking()
    asking = Mixer(OwnConfig(attn_implementation="pyattn"), lambda _, mask: layer(x, mask) @ x.mT)
    asking.layer = layer
    asking(x)
    assert not any("so far" in line for line in adapter.fallbacks(asking))


def test_info_lists_them_and_imports_none():
    command = "main(['info', '--architectures'])"
    code = f"import sys; from pyattn.cli import main; {command}; print('transformers' in sys.modules)"
    lines = fresh.python("-c", code).stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("transformers")]
    assert f" {transformers.__version__}; " in line
    assert line.endswith(" models keep their own attention")
    names = " ".join(lines).partition("own attention  ")[2].split()
    assert {"bloom", "falcon", "mpt"} <= set(names)
    assert "llama" not in names
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "False"


def test_info_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert models.described() is None
    assert "transformers" not in info.facts("cpu")
