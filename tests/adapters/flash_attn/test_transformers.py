"""Promise: while the alias is on, transformers' flash_attention_2 and flash_attention_3 run on a CPU."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils
from transformers.utils import import_utils

from pyattn.adapters import flash_attn as adapter

VERSIONS = [2, 3]


def model_of(attention, **changed):
    torch.manual_seed(2)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, num_key_value_heads=2, dtype=torch.float32, **sizes | changed)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)


def inputs():
    torch.manual_seed(4)
    ids = torch.randint(1, 50, (3, 12))
    padding = torch.ones_like(ids)
    padding[0, :5] = padding[1, :2] = 0
    return ids, padding


@pytest.fixture(autouse=True)
def plain_warnings(monkeypatch):
    """transformers warns once that the model is in float32, or on no GPU."""
    monkeypatch.setattr(modeling_flash_attention_utils.logger, "warning_once", lambda *args, **kwargs: None)


def trained(model, ids, padding):
    """The loss without padding, logits of real tokens, and the gradient of an early weight."""
    real = padding * padding.roll(1, 1)  # the label before the first one is that of padding's logits
    labels = ids.masked_fill(real == 0, -100)
    found = model(ids, attention_mask=padding, labels=labels)
    found.loss.backward()
    return found.loss, found.logits[padding.bool()], model.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("padded", [False, True])
def test_training(version, padded):
    ids, padding = inputs()
    padding = padding if padded else torch.ones_like(ids)
    expected = trained(model_of("eager"), ids, padding)
    with adapter.alias():
        model = model_of(f"flash_attention_{version}")
        assert model.config._attn_implementation == f"flash_attention_{version}"
        assert_close(trained(model, ids, padding), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_generating(version):
    ids, padding = inputs()
    options = {"attention_mask": padding, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model_of("eager").generate(ids, **options)
    with adapter.alias():
        assert torch.equal(model_of(f"flash_attention_{version}").generate(ids, **options), expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_packed_documents(version):
    """Position ids that begin again, which only the packed function keeps apart."""
    ids = inputs()[0][:1]
    positions = torch.tensor([[*range(5), *range(7)]])
    apart = [model_of("eager")(part).logits for part in (ids[:, :5], ids[:, 5:])]
    with adapter.alias():
        model = model_of(f"flash_attention_{version}")
        assert_close(model(ids, position_ids=positions).logits, torch.cat(apart, 1), rtol=1e-4, atol=1e-5)


def test_switching_a_model():
    ids, padding = inputs()
    model = model_of("eager")
    expected = model(ids, attention_mask=padding).logits[padding.bool()]
    for version in VERSIONS:
        with adapter.alias():
            model.set_attn_implementation(f"flash_attention_{version}")
            assert_close(model(ids, attention_mask=padding).logits[padding.bool()], expected, rtol=1e-4, atol=1e-5)


def test_checks_and_their_end():
    """Results that transformers has remembered are forgotten at both ends, and code that kept a check sees both."""

    def checks():
        return import_utils.is_flash_attn_2_available(), import_utils.is_flash_attn_3_available()

    def entries():
        table = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        return [dict(table[version]) for version in VERSIONS]

    before = entries(), import_utils.is_flash_attn_2_available, transformers.utils.is_flash_attn_3_available
    assert checks() == (False, False)
    assert not import_utils.is_flash_attn_greater_or_equal("2.3.3")
    with adapter.alias():
        kept = transformers.utils.is_flash_attn_2_available
        assert checks() == (True, True)
        assert kept()
        assert import_utils.is_flash_attn_greater_or_equal("2.3.3")
        assert not import_utils.is_flash_attn_greater_or_equal("3.0.0")
        model = model_of("flash_attention_2")
    assert not kept()
    assert checks() == (False, False)
    assert not import_utils.is_flash_attn_greater_or_equal("2.3.3")
    assert (entries(), import_utils.is_flash_attn_2_available, transformers.utils.is_flash_attn_3_available) == before
    with pytest.raises(ImportError, match="FlashAttention2 has been toggled on, but"):
        model_of("flash_attention_2")
    with pytest.raises((ImportError, ModuleNotFoundError)):
        model(inputs()[0])  # its functions went with the alias


SCRIPT = """
from pyattn.adapters import flash_attn
flash_attn.enable()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available
if not is_flash_attn_2_available():
    raise ImportError("this model needs flash_attn")
from flash_attn import flash_attn_func, flash_attn_varlen_func
config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = LlamaForCausalLM._from_config(config, attn_implementation="flash_attention_3")
model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
flash_attn.disable()
print(is_flash_attn_2_available())
"""


def test_transformers_imported_afterwards():
    """In a new process; a model file that insists on flash_attn at its import runs."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (found.returncode, found.stdout) == (0, "False\n"), found.stderr


def test_nothing_is_imported_by_enabling():
    """transformers is large: enable looks at it only if it is there."""
    code = (
        "import sys; from pyattn.adapters import flash_attn; flash_attn.enable(); print('transformers' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env).stdout == "False\n"
