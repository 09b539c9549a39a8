"""Every architecture of transformers that requests an attention function and reads text, from shrunken configurations.

A configuration is shrunk by its fields' names, its parts as well, and gets one layer of each kind, or two of the same.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

VOCABULARY = 64
SIZES: dict[int, str] = {
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size max_position_embeddings "
    "n_positions n_ctx max_sequence_length max_target_positions max_source_positions max_length shape_vocab_size "
    "encoder_max_position_embeddings decoder_max_position_embeddings original_max_position_embeddings "
    "pronunciation_vocab_size",
    32: "hidden_size d_model n_embd embedding_size word_embed_proj_dim hidden_dim embed_dim n_embed lru_width "
    "encoder_hidden_size decoder_hidden_size cross_attention_hidden_size global_hidden_size attention_hidden_size",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size n_inner intermediate_size_mlp "
    "mlp_hidden_size shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size "
    "shared_experts_intermediate_size",
    16: "moe_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size moe_latent_size qk_head_dim "
    "q_lora_rank kv_lora_rank o_lora_rank hidden_size_per_layer_input rank adapter_rank mamba_d_state mamba_d_head "
    "ssm_state_size state_size mamba_head_dim mamba_headdim chunk_size mamba_chunk_size linear_attention_head_dim",
    8: "head_dim d_kv index_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim swa_head_dim swa_v_head_dim "
    "kv_channels attention_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim head_size "
    "swa_qk_head_dim swa_qk_nope_head_dim swa_qk_rope_head_dim gate_rank",
    4: "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads num_linear_heads "
    "swa_num_attention_heads index_n_heads n_routed_experts num_experts num_local_experts moe_num_experts "
    "sliding_window local_attention attention_chunk_size sliding_window_size attention_window window_size "
    "linear_num_value_heads mamba_num_heads mamba_n_heads n_mamba_heads index_topk linear_num_heads rotary_dim "
    "decoder_num_attention_heads encoder_num_attention_heads attention_window_size rel_extent index_block_size",
    2: "num_key_value_heads num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_kv_heads "
    "num_decoder_layers num_encoder_layers swa_num_key_value_heads num_experts_per_tok moe_topk moe_k top_k_experts "
    "linear_num_key_heads n_groups mamba_n_groups mamba_ngroups router_topk encoder_num_hidden_layers o_groups "
    "decoder_num_hidden_layers index_topk_blocks index_topk_freq attn_layer_period",
    1: "n_shared_experts num_shared_experts topk_group n_group first_k_dense_replace num_dense_layers zero_expert_num "
    "index_local_blocks n_layers_per_attn_res_block num_mem_blocks attn_layer_offset bos_token_id",
    0: "pad_token_id dropout attention_dropout hidden_dropout activation_dropout attention_probs_dropout_prob "
    "hidden_dropout_prob attn_pdrop resid_pdrop embd_pdrop dropout_rate classifier_dropout embedding_dropout "
    "mlp_dropout residual_dropout layerdrop encoder_layerdrop decoder_layerdrop attn_dropout resid_dropout",
}
VALUES = {name: value for value, names in SIZES.items() for name in names.split()}
VALUES |= {"eos_token_id": 2, "decoder_start_token_id": 1}

ALWAYS = frozenset(
    {
        "bos_token_id",
        "eos_token_id",
        "head_dim",
        "linear_key_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "n_routed_experts",
        "n_shared_experts",
        "num_key_value_heads",
        "pad_token_id",
        "vocab_size",
    }
)
"""Fields that are set where their default is None, too."""

GEMMA = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
HYBRID = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
NGRAMS = {"ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 2}
SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 12}
SLIDING |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "qk_rope_head_dim": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE | {"mrope_section": [2, 1, 1]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3, "n_recurrent_layers": 1},
    "dots1": {"num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4, "per_layer_config": {1: SLIDING}},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "gemma3n_text": GEMMA,
    "gemma4_text": GEMMA,
    "gemma4_unified_text": GEMMA,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["minimax_m3_sparse", "full_attention"],  # an indexer after a layer reads what padding computes
        "index_n_heads": 2,
        "index_block_size": 2,
    },
    "neomme": {"head_dim": 16},
    "qwen4_exp_text": {"indexer_compress_ratio": 4, "hc_lowrank": 4, "ple_embed_dim": 8, "heads_per_ngram": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "t5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID | {"n_mamba_heads": 2, "attention_head_dim": 16, "attention_hidden_size": 64},
    "zamba2": HYBRID,
    "zaya": {"num_experts_per_tok": 1},
}
"""Exceptions from the rules above, by model type."""

CHANGES["dory"]["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
CHANGES["qwen4_exp_text"] |= {"layer_types": ["linear_attention", "full_attention"]} | INDEXER | NGRAMS

UNBUILT = {
    "blt": "the sizes of its four transformers must agree with one another",
    "dots3_note": "its default text configuration names layers that a small one does not have; its text model runs",
    "gemma3n": "its image encoder is timm's, which is not installed; its text model runs",
    "musicgen": "its configuration has parts without defaults",
    "musicgen_melody": "its configuration has parts without defaults",
    "nemo_speechlm": "sizes of its parts must agree with those of another package's encoder",
    "voxtral_realtime": "it takes audio alone",
}
"""Architectures that this file can't make small, and why."""

_IMAGES = "blip-2 idefics instructblip instructblipvideo kosmos-2 pix2struct pp_formulanet udop"
_LARGE = "florence2 glm4v glm4v_moe glm5_next glm_ocr janus muse_glimmer qwen2_5_omni"
_SIZES = "apertus1p5 fun_asr_nano granite_docling hy_v4_vl inkling2 inkling2_loop molmo2 muse_spark paddleocr_vl "
_SIZES += "qwen2_5_vl qwen2_vl unlimited_ocr ernie4_5_vl_moe step3p7 kyutai_speech_to_text"
_DEFAULTS = "chameleon deepseek_ocr2 diffusion_gemma evolla granite4_vision hunyuan_vl qwen2_5_omni_thinker "
_DEFAULTS += "qwen3_omni_moe qwen3_omni_moe_thinker"
UNBUILT |= dict.fromkeys(_IMAGES.split(), "it takes no text without an image")
UNBUILT |= dict.fromkeys(_LARGE.split(), "its image or sound model stays large")
UNBUILT |= dict.fromkeys(_SIZES.split(), "sizes of its parts must agree with one another")
UNBUILT |= dict.fromkeys(_DEFAULTS.split(), "its configuration has parts without defaults")
UNBUILT |= {"inkling_mm_model": "it needs scipy, which is not installed"}

KINDS = {"CausalLM": "CAUSAL_LM", "MaskedLM": "MASKED_LM", "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM"}
KINDS |= {"ImageTextToText": "IMAGE_TEXT_TO_TEXT", "MultimodalLM": "MULTIMODAL_LM"}


@functools.cache
def architectures() -> dict[str, str]:
    """The name of its AutoModel by model type, where the file of the model's class requests an attention function."""
    found: dict[str, str] = {}
    models = Path(transformers.__file__).parent / "models"
    for kind, mapping in KINDS.items():
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            files = (models / model_type_to_module_name(model_type)).glob("modeling_*.py")
            codes = (path.read_text(encoding="utf-8") for path in files)
            if any(f"class {name}(" in code and "get_interface(" in code for code in codes):
                found.setdefault(model_type, kind)
    return found


def configuration(kind: type, default: Any = None) -> Any:
    """A small configuration of a class; ``default`` is one of the usual size."""
    default = kind() if default is None else default
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    integers = {field.name for field in dataclasses.fields(kind) if field.type in (int, "int")}
    other = {name: alias for alias, name in kind.attribute_map.items()}
    arguments: dict[str, Any] = {}
    for name, unset in known.items():
        value = VALUES.get(name, VALUES.get(other.get(name, "")))
        usual = vars(default).get(name, unset)
        if (
            value is None
            or isinstance(usual, bool | list | tuple | dict | str)
            or (usual is None and name not in ALWAYS)
        ):
            continue
        arguments[name] = float(value) if "drop" in name and name not in integers else value
    if {"kv_lora_rank", "num_key_value_heads"} <= known.keys():
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    for name in kind.sub_configs:
        if name in known and getattr(default, name, None) is not None:
            part = getattr(default, name)
            arguments[name] = configuration(type(part), part)
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if types and "layer_types" in known:
        types *= 1 + (len(types) == 1)
        arguments |= {"layer_types": types, "num_hidden_layers": len(types)}
    rope = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" in rope:  # time, height and width, half a head together
        arguments["rope_parameters"] = rope | {"mrope_section": [2, 1, 1]}
    return kind(**arguments | CHANGES.get(kind.model_type, {}))


def model(model_type: str, kind: str, noise: float = 0.2) -> Any:
    """A model without dropout, with weights large enough for attention to matter."""
    made = getattr(transformers, f"AutoModelFor{kind}")
    config = configuration(CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        count = sum(p.numel() for p in made.from_config(config, attn_implementation="eager").parameters())
    assert count < 2**24, f"{model_type} has {count} parameters"
    torch.manual_seed(0)
    found = made.from_config(config, attn_implementation="eager").eval()
    if hasattr(found, "set_experts_implementation"):
        found.set_experts_implementation("eager")  # the others don't support float64
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return found
