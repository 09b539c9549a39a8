"""Models of transformers, converted by pyattn.adapters.scratch, beside themselves: prints a Markdown table.

    python tests/tools/scratch_models.py [model type ...]

Every model is small, with eager attention and without dropout. Outputs and the gradients of all parameters are compared
in float64 over three forwards in evaluation, one in training, and with padding left and right where the model has a
mask; greedy generation with a cache in float32. Differences are relative to the largest output and to the largest
gradient of any parameter.
"""

import contextlib
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from pyattn.adapters import scratch
from pyattn.adapters.scratch import native
from tests.support.adapters import tiny

LENGTH = 24
IDS = torch.randint(3, tiny.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PADDING = {
    "left": torch.arange(LENGTH).ge(torch.tensor([[9], [0]])).long(),
    "right": torch.arange(LENGTH).lt(torch.tensor([[LENGTH], [15]])).long(),
}
TEXT = ("CausalLM", "MaskedLM", "Seq2SeqLM")
PIXELS: dict[str, Any] = {"image_size": 32, "patch_size": 4}
SWIN: dict[str, Any] = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
ASSISTANT: dict[str, Any] = {
    "backbone_hidden_size": 32,
    "text_config": {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "pad_token_id": 0,
    },
}
CHANGES: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "bloom": {"n_head": 4},
    "data2vec-vision": PIXELS | {"use_relative_position_bias": True},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "donut-swin": PIXELS | SWIN,
    "falcon": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "hiera": {"image_size": [32, 32], "patch_size": [7, 7], "embed_dim": 16, "depths": [1, 2], "num_heads": [1, 2]},
    "led": {"attention_window": [8, 8]},
    "longformer": {"attention_window": [8, 8]},
    "maskformer-swin": PIXELS | SWIN,
    "luke": {"entity_vocab_size": 8},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "mpt": {"n_heads": 4},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "num_self_attention_heads": 4}
    | {"num_cross_attention_heads": 4},
    "reformer": {"attn_layers": ["local", "lsh"], "is_decoder": True, "axial_pos_embds_dim": [8, 24]}
    | {
        "axial_pos_shape": [4, 6],
        "hash_seed": 0,
        "num_hashes": 1,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "swin": PIXELS | SWIN,
    "swin2sr": SWIN | {"image_size": 16, "patch_size": 1},
    "swinv2": PIXELS | SWIN,
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1, 1, 1], "downsampling_ratios": [2, 2], "num_filters": 4},
    "videomae": PIXELS | {"num_frames": 4, "tubelet_size": 2},
    "xlstm": {"embedding_dim": 32, "num_heads": 2, "num_blocks": 2, "chunk_size": 8},
    "yolos": PIXELS | {"image_size": [32, 32], "num_detection_tokens": 5},
}
"""Changes of the small configurations, by model type."""

ASSISTANTS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
"""Model types that read the keys and values of another model, each with its text model's."""

_PROMPTED = "fuyu gemma3 gemma4 gemma4_unified git got_ocr2 modernvbert neomme omniasr "
_PROMPTED += "t5gemma2 ultravbert vibevoice_asr"
PROMPTED = frozenset(_PROMPTED.split())
"""Models that read text without an image or sound, whose encoders' sizes do not follow from those of the text."""


OTHERS = (
    "aimv2_vision_model beit blip canine clipseg convbert data2vec-audio data2vec-vision deit dinov2 "
    "donut-swin funnel glpn hubert ijepa maskformer-swin mobilevit mobilevitv2 pvt_v2 segformer swiftformer swin "
    "swin2sr swinv2 tapas unispeech videomae vilt vit vit_mae vitdet visual_bert wav2vec2 wavlm yolos"
)
"""Model types that AutoModel builds, which take pixels, sound, or text without predicting any."""


class Found(NamedTuple):
    """The outcome for a model; differences are relative."""

    taken: int
    left: Counter[str]
    modules: int
    out: float
    gradients: float
    notes: str


class Case(NamedTuple):
    """How a model runs."""

    name: str
    dtype: torch.dtype
    training: bool = False
    mask: Tensor | None = None

    def __hash__(self) -> int:
        return hash(self.name)


Results = tuple[Tensor, list[Tensor]]
BOUNDS = {torch.float64: 2.0**-17, torch.float32: 2.0**-8}
"""Norms, rotary tables and softmaxes compute in float32 in float64 models, too: tests/support/adapters/models.py."""


def kind_of(model_type: str) -> str | None:
    """The AutoModel's ending for a model type that reads and predicts text, else None."""
    names = {"CausalLM": "CAUSAL_LM", "MaskedLM": "MASKED_LM", "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM"}
    for kind in TEXT:
        if model_type in getattr(modeling_auto, f"MODEL_FOR_{names[kind]}_MAPPING_NAMES"):
            return kind
    return None


def assistant(model_type: str) -> Any:
    """A small configuration of an assistant; the usual one is not valid."""
    text = ASSISTANT["text_config"] | {"model_type": ASSISTANTS[model_type]}
    return CONFIG_MAPPING[model_type](**ASSISTANT | {"text_config": text})


def built(model_type: str) -> nn.Module:
    """A small model with weights large enough for attention to matter."""
    kind = kind_of(model_type)
    config = assistant(model_type) if model_type in ASSISTANTS else tiny.configuration(CONFIG_MAPPING[model_type])
    if not kind and model_type not in CHANGES:
        for name, value in PIXELS.items():
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, value)
    auto = getattr(transformers, f"AutoModelFor{kind}" if kind else "AutoModel")
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config, attn_implementation="eager").parameters())
    if size > 2**23:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others don't support float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0
    return model


def inputs_of(model: nn.Module, mask: Tensor | None) -> dict[str, Any]:
    """Arguments for the model's forward."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(2)
    size = getattr(model.config, "image_size", 32)
    given: dict[str, Any] = {}
    if model.config.model_type in ASSISTANTS:
        kinds = ("full_attention", "sliding_attention")
        shared = torch.randn(2, 2, 2, 2, LENGTH, 8, generator=generator, dtype=dtype)
        given["shared_kv_states"] = {kind: tuple(x) for kind, x in zip(kinds, shared, strict=True)}
        given["inputs_embeds"] = torch.randn(2, 1, 64, generator=generator, dtype=dtype)  # one query, as it decodes
        return given if mask is None else given | {"attention_mask": mask}
    if "input_ids" in names:
        given["input_ids"] = IDS
    if "decoder_input_ids" in names and model.config.is_encoder_decoder:
        given["decoder_input_ids"] = IDS[:, :20]
    if mask is not None:
        given["attention_mask"] = mask
    if model.config.model_type in PROMPTED:
        return given
    if model.config.model_type == "xlstm":
        given["use_cache"] = False  # its cache has other sizes than its kernels
    if "pixel_values" in names:
        size = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(model.config, "num_channels", 3)
        frames = [model.config.num_frames] if hasattr(model.config, "tubelet_size") else []
        given["pixel_values"] = torch.randn(2, *frames, channels, *size, generator=generator, dtype=dtype)
    if "input_values" in names:
        given["input_values"] = torch.randn(2, 4000, generator=generator, dtype=dtype)
    return given


def first(outputs: Any) -> Tensor:
    """The largest tensor of floating point that requires a gradient."""
    values = outputs.values() if hasattr(outputs, "values") else outputs
    found = [x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]
    return max(found, key=lambda x: x.numel())


@contextlib.contextmanager
def precise(dtype: torch.dtype) -> Iterator[None]:
    """Softmaxes that models compute in float32 are in float64 if the model is: their rounding hides everything else."""
    softmax = functional.softmax
    if dtype == torch.float64:
        functional.softmax = lambda x, dim=None, _stacklevel=3, dtype=None: softmax(x, dim=dim)
    try:
        yield
    finally:
        functional.softmax = softmax


def step(model: nn.Module, case: Case) -> Results:
    """Outputs and gradients of a weighted sum of them."""
    with precise(case.dtype):
        return _step(model, case)


def _step(model: nn.Module, case: Case) -> Results:
    model.to(case.dtype).train(case.training).zero_grad()
    torch.manual_seed(3)
    out = first(model(**inputs_of(model, case.mask)))
    if case.mask is not None and out.shape[:2] == case.mask.shape:
        out = out[case.mask.bool()]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights.to(out.dtype)).sum().backward()
    return out.detach() + 0, [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def relative(found: Results, truth: Results) -> tuple[float, float]:
    """The largest differences of outputs and gradients; inf if only one side is finite."""
    out = _largest([found[0] - truth[0]]) / _largest([truth[0]])
    return out, _largest([a - b for a, b in zip(found[1], truth[1], strict=True)]) / max(_largest(truth[1]), 1e-300)


def _finite(results: Results) -> bool:
    return all(bool(x.isfinite().all()) for x in (results[0], *results[1]))


def _largest(tensors: list[Tensor]) -> float:
    largest = max(float(x.abs().max()) for x in tensors if x.numel())
    return largest


def compared(model_type: str) -> Found:
    """A model beside itself, converted."""
    model = built(model_type)
    masked = kind_of(model_type) is not None and "attention_mask" in inspect.signature(model.forward).parameters
    double = (Case("eval", torch.float64), Case("train", torch.float64, training=True))
    dtype = torch.float64 if any(_runs(model, case) for case in double) else torch.float32
    cases = [Case("eval", dtype), Case("train", dtype, training=True)]
    cases += [Case(name, dtype, mask=mask) for name, mask in PADDING.items() if masked]
    notes = ["in float32"] * (dtype == torch.float32)
    plain = {case: truth for case in cases if (truth := _truth(model, case, notes)) is not None}
    if not plain:
        raise ValueError("; ".join(notes))
    generated = _generated(model)
    scratch.reset_counts()
    scratch.convert(model)
    worst = [0.0, 0.0]
    for case, truth in plain.items():
        for _ in range(3 if case is next(iter(plain)) else 1):
            differences = relative(step(model, case), truth)
            if not max(differences) <= BOUNDS[case.dtype]:
                notes.append(f"**{case.name} {differences[0]:.0e} {differences[1]:.0e}**")
            worst = [max(a, b) for a, b in zip(worst, differences, strict=True)]
    counted = scratch.counts()
    if generated is not None:
        ours = _generated(model)
        if ours is None or not torch.equal(ours, generated):
            notes.append("**generates other tokens**")
    modules = sum(len(module._forward_pre_hooks) > 0 for module in model.modules())
    notes.append("+".join([case.name for case in plain] + ["generate"] * (generated is not None)))
    return Found(counted.taken, Counter(counted.left), modules, *worst, "; ".join(notes))


def _runs(model: nn.Module, case: Case) -> bool:
    try:
        return _finite(step(model, case))
    except (AssertionError, RuntimeError):
        return False


def _truth(model: nn.Module, case: Case, notes: list[str]) -> Results | None:
    """The plain model's results, if they are finite and repeat."""
    try:
        truth = step(model, case)
    except Exception as error:
        notes.append(f"no {case.name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:70]}")
        return None
    if case.training and relative(step(model, case), truth)[0] > 0:
        notes.append("training draws numbers")
    elif not _finite(truth):
        notes.append(f"plain {case.name} is not finite")
    else:
        return truth
    return None


def _generated(model: nn.Module) -> Tensor | None:
    if not hasattr(model, "generate") or not getattr(model, "can_generate", lambda: False)():
        return None
    model.eval().float()
    try:
        mask = PADDING["left"] if not model.config.is_encoder_decoder else torch.ones_like(IDS)
        out: Tensor = model.generate(IDS, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=True)
    except Exception:
        return None
    return out


def verdict(found: Found) -> str:
    """How much of a model's attention became native."""
    if not found.taken:
        return "not at all native"
    return "partly native" if found.left else "wholly native"


def row(model_type: str, found: Found) -> str:
    """A row of the table."""
    left = ", ".join(f"{n} {reason}" for reason, n in found.left.most_common())
    return (
        f"| {model_type} | {found.taken} | {left} | {found.modules} | {found.out:.0e} | {found.gradients:.0e} "
        f"| {found.notes} |"
    )


def main() -> None:
    """Prints the table of the named model types, or of all that read and predict text and some others."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    native.MIN_SCORES = 0
    tiny.CHANGES.update(CHANGES)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| model | taken | left, by reason | modules watched | outputs differ by | gradients differ by | notes |")
    print("|---|---|---|---|---|---|---|", flush=True)
    verdicts: Counter[str] = Counter()
    failures: dict[str, str] = {}
    text = {name for name in CONFIG_MAPPING_NAMES if kind_of(name) and name not in tiny.UNBUILT}
    for model_type in sys.argv[1:] or sorted(text | set(OTHERS.split())):
        try:
            found = compared(model_type)
        except Exception as error:
            failures[model_type] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:70]}"
            continue
        verdicts[verdict(found)] += 1
        print(row(model_type, found), flush=True)
    print("\n" + ", ".join(f"{n} {name}" for name, n in verdicts.most_common()) + f"; {len(failures)} did not run.\n")
    for model_type, message in failures.items():
        print(f"- {model_type}: {message}")


if __name__ == "__main__":
    main()
