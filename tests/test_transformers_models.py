"""Promise: the architectures that can't run here are known before a model is made, without importing them."""

import importlib
import subprocess
import sys

import pytest
from transformers import PreTrainedModel

from pyattn.adapters import transformers_models
from pyattn.cli import info

NAMES = ["bert", "bloom", "codegen", "falcon", "gpt2", "gpt_neo", "gptj", "llama", "mpt", "t5", "xglm"]


def test_the_list_is_what_transformers_says_itself() -> None:
    listed = transformers_models.installed_with_attention_of_their_own()
    assert listed is not None
    assert sorted(listed) == listed
    for name in NAMES:
        models = vars(importlib.import_module(f"transformers.models.{name}.modeling_{name}")).values()
        kinds = [x for x in models if isinstance(x, type) and issubclass(x, PreTrainedModel)]
        model = next(kind for kind in kinds if kind is not PreTrainedModel)
        assert (name in listed) != model._can_set_attn_implementation(), name


def test_info_lists_them_and_imports_none() -> None:
    code = "import sys; from pyattn.cli import main; main(['info']); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("transformers")]
    assert " architectures keep their own attention: " in line
    assert {"bloom", "falcon", "gptj"} <= set(line.split())
    assert "llama" not in line.split()
    assert done.stdout.splitlines()[-1] == "False"


def test_info_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert transformers_models.installed_with_attention_of_their_own() is None
    assert "transformers" not in info.facts("cpu")
