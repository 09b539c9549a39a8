// The operators for packed sequences, as ops.cpp registers them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>

#include "checks.h"

namespace pyattn {

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_varlen_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
    SymInt max_seqlen_q, SymInt max_seqlen_k, const optional<Tensor>& seqused_k, optional<double> softmax_scale,
    bool causal, optional<SymInt> q_offset, const optional<Tensor>& q_offsets, c10::SymIntArrayRef window,
    const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_varlen_backward(
    const Tensor& dout, const optional<Tensor>& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& row_max, const Tensor& row_sum, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, const optional<Tensor>& seqused_k,
    optional<double> softmax_scale, bool causal, optional<SymInt> q_offset, const optional<Tensor>& q_offsets,
    c10::SymIntArrayRef window, const optional<Tensor>& key_ranges, double softcap, const optional<Tensor>& bias,
    const optional<Tensor>& alibi_slopes, const optional<Tensor>& sinks, double dropout_p,
    const optional<Tensor>& dropout_seed, bool deterministic, std::array<bool, 3> output_mask, bool part);

}  // namespace pyattn
