"""Promise: the tables of packed sequences, caches and decoding compare equal computations, and count their work."""

import json

import pytest
import torch
from support.assertions import assert_close

from pyattn.cli import InputError
from pyattn.cli.bench import comparisons
from pyattn.cli.bench.sides import decode, kv_caches, varlen
from pyattn.cli.gpt import Config


@pytest.fixture
def table(shown, tmp_path):
    """The rows that a run writes, and what it prints: all sides, and the one that speed-ups are over."""

    def run(kind):
        printed = shown(f"bench --only {kind} --dtype float32 --threads 1 --out {tmp_path}").out
        results = json.loads((tmp_path / "results.json").read_text())["results"]
        assert all(row["side"] in printed for row in results)
        assert f"speed-ups over {comparisons.KINDS[kind].base}" in printed
        return results, printed

    return run


# Packed sequences


def test_packed_sequences(monkeypatch, table):
    """Each side is timed in both directions; operations are those of the sequences, without padding."""
    words = {"sentences": [1, 9, 4], "docstrings": [30, 2]}
    monkeypatch.setattr(varlen, "lengths_of", lambda text, count: words[text])
    result, _ = table("varlen")
    assert [row["what"] for row in result] == ["varlen sentences float32"] * 6 + ["varlen docstrings float32"] * 6
    for row in result:
        done = 2 * sum(n * (n + 1) for n in words[row["what"].split()[1]]) * varlen.HEADS * varlen.HEAD_DIM
        for key, share in (("forward", 1.0), ("forward_backward", 3.5)):
            assert row[key]["flops_per_second"] == pytest.approx(share * done / row[key]["seconds"])
            assert 0 < row[key]["of_peak"] < 1


@pytest.mark.parametrize("lengths", [[1], [5, 1, 12, 12, 3]])
def test_sides_of_packed_sequences_compute_the_same(lengths):
    sides = varlen.sides(lengths, torch.float64, "cpu")
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def results(side):
        return [t if t.dim() == 3 else t.transpose(1, 2)[real] for t in (side.forward(), *side.gradients())]

    expected = results(sides[varlen.BASE])
    assert expected[0].shape == (sum(lengths), varlen.HEADS, varlen.HEAD_DIM)
    for side in sides.values():
        for ours, theirs in zip(results(side), expected, strict=True):
            assert_close(ours, theirs)


@pytest.fixture
def forgotten():
    """Clears the cached documentation before and after the test."""
    varlen.documentation.cache_clear()
    yield
    varlen.documentation.cache_clear()


LIBRARY = '''"""One two three. Four five?

Six
seven"""
class Empty: pass
class Full:
    """Eight!"""
    async def run(self):
        "e.g. 3.5 nine"
    x = "no documentation"
'''


@pytest.mark.usefixtures("forgotten")
def test_lengths_are_those_of_documentation(monkeypatch, tmp_path):
    (tmp_path / "a.py").write_text(LIBRARY)
    (tmp_path / "b.py").write_text("")
    monkeypatch.setattr(varlen.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    assert sorted(varlen.lengths_of("docstrings", 3)) == [1, 3, 7]
    assert sorted(varlen.lengths_of("sentences", 6)) == [1, 1, 2, 2, 2, 3]
    with pytest.raises(InputError, match="the standard library must have 7 sentences, got 6"):
        varlen.lengths_of("sentences", 7)


def test_lengths_are_the_same_each_time():
    for text in varlen.TEXTS:
        lengths = varlen.lengths_of(text, varlen.SEQUENCES)
        assert lengths == varlen.lengths_of(text, varlen.SEQUENCES)
        assert min(lengths) > 0
        assert len(set(lengths)) > 5


# Caches


def test_caches(monkeypatch, table):
    """A token is timed over each cache, in bytes of keys and values per second; recomputation only if short."""
    monkeypatch.setattr(kv_caches, "SIZES", ((2, 2, 9, 8), (4, 2, 30, 8)))
    monkeypatch.setattr(kv_caches, "LONGEST_RECOMPUTED", 9)
    result, printed = table("cache")
    assert [line.split()[-1] for line in printed.splitlines() if line.startswith("token ")] == ["GB/s", "GB/s"]
    named = {
        "cache 2/2 heads, 9 tokens, float32": 2 * 2 * 9 * 8 * 4,
        "cache 4/2 heads, 30 tokens, float32": 2 * 2 * 30 * 8 * 4,
    }
    assert [row["what"] for row in result] == [what for what, n in zip(named, (7, 5), strict=True) for _ in range(n)]
    assert ["recomputing" in row["side"] for row in result].count(True) == 2
    for row in result:
        assert row["forward"]["bytes_per_second"] == pytest.approx(named[row["what"]] / row["forward"]["seconds"])


@pytest.mark.parametrize("sizes", [(2, 2, 1, 8), (2, 2, 40, 8), (6, 2, 40, 8)])
def test_sides_of_caches_compute_the_same_each_time(sizes):
    calls = kv_caches.sides(sizes, torch.float64, "cpu")
    keys_and_values = calls.pop(kv_caches.READING)()
    assert all(t.dim() == 0 for t in keys_and_values)
    out = calls[kv_caches.BASE]()
    assert out.shape == (1, sizes[0], 1, 8)
    for call in calls.values():
        for _ in range(2):
            assert_close(call(), out)


# Decoding


def test_decoding(monkeypatch, table):
    """A token is timed with and without caches, in tokens per second; all sides compute the same logits."""
    monkeypatch.setattr(decode, "CONTEXTS", (9, 30))
    monkeypatch.setattr(decode, "MODEL", Config(layers=2, heads=2, width=16))
    result, printed = table("decode")
    assert "tokens/s" in printed
    assert [row["what"] for row in result] == ["decode 9 float32"] * 5 + ["decode 30 float32"] * 5
    for row in result:
        assert row["forward"]["tokens_per_second"] == 1 / row["forward"]["seconds"]
    for context in (1, 30):
        calls = decode.sides(context, torch.float64, "cpu")
        for logits in (call() for call in calls.values() for _ in range(2)):
            assert_close(logits, calls[decode.BASE]())
