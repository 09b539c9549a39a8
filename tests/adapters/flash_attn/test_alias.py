"""Promise: the alias gives flash_attn's module names and padding functions, and can be switched on and off."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest
import torch
from torch.testing import assert_close

from pyattn.adapters import flash_attn as adapter
from pyattn.adapters.flash_attn import hopper, padding, rotary

INSTALLED = "from flash_attn.flash_attn_interface import flash_attn_func\n__version__ = '2.3.4'\n"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An installed flash_attn that Python finds; the fixture removes every trace of it."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text(INSTALLED)
    (tmp_path / "flash_attn" / "flash_attn_interface.py").write_text("flash_attn_func = 'installed'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_imports_within_the_alias():
    with adapter.alias():
        assert adapter.enabled()
        assert importlib.util.find_spec("flash_attn") is not None
        import flash_attn

        assert flash_attn.flash_attn_interface.flash_attn_func is adapter.flash_attn_func
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary

        assert tuple(map(int, flash_attn.__version__.split("+")[0].split("."))) >= (2, 8, 4)
    assert not adapter.enabled()
    assert flash_attn_func is adapter.flash_attn_func
    assert flash_attn_varlen_func is adapter.flash_attn_varlen_func
    assert flash_attn_varlen_qkvpacked_func is adapter.flash_attn_varlen_qkvpacked_func
    assert flash_attn_with_kvcache is adapter.flash_attn_with_kvcache
    assert (index_first_axis, pad_input, unpad_input) == (
        padding.index_first_axis,
        padding.pad_input,
        padding.unpad_input,
    )
    assert (apply_rotary, apply_rotary_emb) == (rotary.apply_rotary, rotary.apply_rotary_emb)
    assert RotaryEmbedding(8).dim == 8
    assert "flash_attn" not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn")


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("import flash_attn.losses", "flash_attn.losses"),
        ("import flash_attn.losses.cross_entropy", "flash_attn.losses"),
        ("from flash_attn.modules.mha import MHA", "flash_attn.modules"),
        ("import flash_attn.ops.rms_norm", "flash_attn.ops.rms_norm"),
        ("from flash_attn.ops.triton import layer_norm", "flash_attn.ops.triton.layer_norm"),
        ("from flash_attn import flash_blocksparse_attn_func", "flash_attn.flash_blocksparse_attn_func"),
    ],
)
def test_what_the_alias_lacks(statement, missing):
    """The reason is one sentence, and code with an ``except ImportError`` takes its fallback."""
    has = "flash_attn, flash_attn.flash_attn_interface, flash_attn.bert_padding, flash_attn.layers.rotary, "
    has += "flash_attn.ops.triton.rotary, flash_attn.cute, flash_attn.cute.interface"
    with adapter.alias(), pytest.raises(ImportError) as caught:
        exec(statement)
    assert str(caught.value) == f"pyattn: a module of the flash_attn alias must be one of {has}, got {missing}"
    with pytest.raises(ImportError, match="No module named 'flash_attn'"):
        exec(statement)


def test_version_3_within_the_alias():
    """All names that code takes from flash_attn_interface, and the package that holds it."""
    with adapter.alias():
        import flash_attn_3
        import flash_attn_interface
        from flash_attn_interface import _flash_attn_backward, _flash_attn_forward, get_scheduler_metadata

        assert callable(_flash_attn_backward)
        assert flash_attn_3.flash_attn_interface._flash_attn_forward is _flash_attn_forward
        assert flash_attn_interface.get_scheduler_metadata is get_scheduler_metadata is hopper.get_scheduler_metadata
        for name in hopper.__all__:
            assert getattr(flash_attn_interface, name) is getattr(hopper, name)
        with pytest.raises(ImportError, match="a module of the flash_attn_3 alias must be one of flash_attn_3, flash"):
            importlib.import_module("flash_attn_3._C")
    assert not [name for name in sys.modules if name.startswith("flash_attn")]
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn_interface")


def test_distributions():
    """Libraries ask importlib.metadata, by either spelling, and list all packages."""
    for _ in range(2):
        with adapter.alias():
            version = importlib.metadata.version
            assert version("flash_attn") == version("flash-attn") == importlib.import_module("flash_attn").__version__
            assert (
                version("flash_attn_3")
                == version("flash-attn-3")
                == importlib.import_module("flash_attn_3").__version__
            )
            packages = importlib.metadata.packages_distributions()
            assert packages["flash_attn"] == ["flash-attn"]
            assert packages["flash_attn_interface"] == packages["flash_attn_3"] == ["flash-attn-3"]
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash_attn")


def test_what_version_3_returns_is_chosen_once():
    with adapter.alias(fa3_returns_lse=True):
        function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
        assert inspect.signature(function) == inspect.signature(hopper.flash_attn_varlen_func)
        with pytest.raises(
            RuntimeError, match=r"^pyattn: flash_attn is enabled with fa3_returns_lse=True; call disable"
        ):
            adapter.enable()
        adapter.enable(fa3_returns_lse=True)
    assert adapter.enabled()
    adapter.disable()
    assert not adapter.enabled()


def test_code_that_has_bound_a_copy(installed, monkeypatch):
    """The installed function in another module would go on beside pyattn's; a module that is deleted does not count."""
    (installed / "flash_attn" / "flash_attn_interface.py").write_text("def flash_attn_func(): return 'installed'\n")
    (installed / "bound_before.py").write_text("from flash_attn import flash_attn_func as attend\n")
    theirs = importlib.import_module("bound_before")
    with pytest.raises(
        RuntimeError, match=r"imports the installed flash-attn's functions, got bound_before.attend; enable"
    ):
        adapter.enable(force=True)
    assert not adapter.enabled()
    assert theirs.attend() == "installed"
    monkeypatch.delitem(sys.modules, "bound_before")
    with adapter.alias(force=True):
        assert importlib.import_module("bound_before").attend is adapter.flash_attn_func
    del sys.modules["bound_before"]


def test_an_installed_version_3(tmp_path, monkeypatch):
    (tmp_path / "flash_attn_interface.py").write_text("flash_attn_func = 'installed'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    with pytest.raises(
        RuntimeError, match=r"^pyattn: flash_attn_interface must not be installed, or force=True given, got "
    ):
        adapter.enable()
    with adapter.alias(force=True):
        assert importlib.import_module("flash_attn_interface").flash_attn_func is hopper.flash_attn_func
    assert importlib.import_module("flash_attn_interface").flash_attn_func == "installed"
    del sys.modules["flash_attn_interface"]


def test_enabling_twice_and_nested():
    adapter.enable()
    with adapter.alias():
        adapter.enable()
    assert adapter.enabled()
    assert importlib.import_module("flash_attn").flash_attn_func is adapter.flash_attn_func
    adapter.disable()
    adapter.disable()
    assert importlib.util.find_spec("flash_attn") is None


NANOCHAT = """
import torch
from types import SimpleNamespace

def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    return "plain"

def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, **options):
    return "plain"

flash_attn = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
"""


@pytest.fixture
def nanochat(tmp_path, monkeypatch):
    """A package with a module of nanochat's kind."""
    (tmp_path / "nanochat_like").mkdir()
    (tmp_path / "nanochat_like" / "__init__.py").write_text("")
    (tmp_path / "nanochat_like" / "flash_attention.py").write_text(NANOCHAT)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "nanochat_like.flash_attention"
    for name in [name for name in sys.modules if name.split(".")[0] == "nanochat_like"]:
        del sys.modules[name]


@pytest.mark.parametrize("before", [False, True])
def test_an_object_of_nanochats_kind(nanochat, before):
    """Imported before or after enabling; disabling puts its functions back."""
    if before:
        importlib.import_module(nanochat)
    adapter.enable()
    theirs = importlib.import_module(nanochat).flash_attn
    assert theirs.flash_attn_func is adapter.flash_attn_func
    q, k, v = torch.randn(3, 1, 5, 2, 8).unbind()
    k_cache, v_cache = torch.zeros(2, 1, 7, 2, 8).unbind()
    lengths = torch.zeros(1, dtype=torch.int32)
    whole = theirs.flash_attn_func(q, k, v, causal=True, window_size=(2, 0))
    cached = theirs.flash_attn_with_kvcache(
        q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True, window_size=(2, 0)
    )
    assert_close(cached, whole)
    adapter.disable()
    assert theirs.flash_attn_func(q, k, v) == theirs.flash_attn_with_kvcache(q, k, v) == "plain"
    with adapter.alias():
        assert theirs.flash_attn_func is adapter.flash_attn_func
    assert theirs.flash_attn_func(q, k, v) == "plain"


def test_nothing_used_it():
    adapter.enable()
    with pytest.warns(
        UserWarning, match=r"^pyattn: nothing used flash_attn.enable\(\), got no import of flash_attn and"
    ):
        adapter.disable()
    assert not adapter.enabled()


def test_a_failing_block_leaves_nothing():
    with pytest.raises(KeyError), adapter.alias():
        raise KeyError
    assert not adapter.enabled()


def test_an_installed_flash_attn_is_not_shadowed_silently(installed):
    with pytest.raises(RuntimeError, match=r"^pyattn: flash_attn must not be installed, or force=True given, got "):
        adapter.enable()
    assert not adapter.enabled()
    theirs = importlib.import_module("flash_attn")
    with pytest.raises(RuntimeError, match=str(installed)), adapter.alias():
        pass
    with adapter.alias(force=True):
        assert importlib.import_module("flash_attn").flash_attn_func is adapter.flash_attn_func
        assert importlib.util.find_spec("flash_attn.flash_attn_interface").origin.endswith("__init__.py")
    assert importlib.import_module("flash_attn") is theirs
    assert sys.modules["flash_attn.flash_attn_interface"].flash_attn_func == "installed"


def test_padding_and_back():
    x = torch.randn(3, 6, 2, 4, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    tokens, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask)
    assert_close(tokens, x[mask.bool()])
    assert indices.tolist() == [0, 1, 2, 13, 14, 15, 16, 17]
    assert cu_seqlens.tolist() == [0, 3, 3, 8]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert longest == 5
    assert used.tolist() == [3, 0, 5]
    back = padding.pad_input(tokens, indices, 3, 6)
    assert_close(back, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad((back * torch.arange(6.0)[:, None, None]).sum(), x)
    assert_close(gradient, (mask * torch.arange(6.0))[..., None, None].expand_as(x))


def test_padding_with_an_unused_mask():
    """Tokens in either mask are packed; seqused counts those of the first mask."""
    x = torch.randn(2, 4, 3)
    mask, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]])
    tokens, _, cu_seqlens, longest, used = padding.unpad_input(x, mask.bool(), unused.bool())
    assert_close(tokens, torch.cat([x[0, :3], x[1]]))
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 7], 4, [2, 1])


@pytest.mark.parametrize("marks", [torch.tensor([3, 1, -2, 7]), torch.tensor([2.5, 1, -1, 4]), torch.ones(4).bool()])
@pytest.mark.parametrize("unused", [None, torch.tensor([[1, 1, 0, 0], [-1, 2, 2, 2]])])
def test_any_number_but_zero_marks_one_token(marks, unused):
    """Masks that number the sequences of a row, and masks that overlap, also where their sum is 0."""
    x, seen = torch.randn(2, 4, 3), torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)
    results = padding.unpad_input(x, marks * seen, unused)
    expected = padding.unpad_input(x, seen, None if unused is None else unused.bool())
    for result, one in zip(results, expected, strict=True):
        assert_close(torch.as_tensor(result), torch.as_tensor(one))
    packed = seen if unused is None else seen | unused.bool()
    assert_close(results[0], x[packed])
    assert results[2].diff().tolist() == packed.sum(-1).tolist()
    assert results[4].tolist() == [3, 1]


def test_rows_of_several_sequences():
    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert_close(tokens, torch.cat([x[0, :5], x[1]]))
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert (cu_seqlens.tolist(), longest) == ([0, 2, 5, 11], 6)


def test_indices_that_come_again_add_their_gradients():
    x = torch.randn(4, 3, requires_grad=True)
    taken, residual = padding.index_first_axis_residual(x, torch.tensor([1, 1, 3]))
    (gradient,) = torch.autograd.grad(taken.sum() + residual.sum(), x)
    assert gradient[:, 0].tolist() == [1, 3, 1, 2]
