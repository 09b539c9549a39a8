// float64, for which gradients are checked and speed does not matter: a warp to a row, or to a key, one dot product after the
// other, columns on the lanes. row_max of the
// params is the largest score. (Templates of a type that is always double, so that other dtypes do not compile them.)
#pragma once

namespace pyattn::cuda {
namespace {

inline constexpr int kPlainWarps = 4, kPlainThreads = kPlainWarps * kWarpLanes;

// A lane's columns of a row of up to 256: lane, lane + 32, ...
inline constexpr int kLaneColumns = 256 / kWarpLanes;
struct PlainRow {
  double column[kLaneColumns] = {};

  PYATTN_DEVICE PlainRow() {}
  PYATTN_DEVICE PlainRow(const double* row, int64_t cols) {
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane() + i * kWarpLanes < cols) column[i] = row[lane() + i * kWarpLanes];
  }

  PYATTN_DEVICE void store(double* row, int64_t cols, double scale) const {
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane() + i * kWarpLanes < cols) row[lane() + i * kWarpLanes] = column[i] * scale;
  }

  PYATTN_DEVICE void add(double factor, const PlainRow& other) {
    for (int i = 0; i < kLaneColumns; ++i) column[i] += factor * other.column[i];
  }

  PYATTN_DEVICE double dot(const PlainRow& other) const {
    double sum = 0;
    for (int i = 0; i < kLaneColumns; ++i) sum += column[i] * other.column[i];
    return sum_lanes(sum);
  }
};

// The row, or key, of this warp, of count to a head: its head, its place there, and whether there is one.
struct PlainItem {
  int64_t head, place;
  bool there;

  PYATTN_DEVICE PlainItem(const ForwardParams& p, int64_t count) {
    const int64_t at = block_index() * kPlainWarps + warp();
    head = at / count, place = at % count, there = head < p.batch * p.num_heads_kv;
  }
};

// What dropout makes of the weight of row r and key j.
PYATTN_DEVICE double dropout_factor(const ForwardParams& p, const HeadRows& head, int64_t r, int64_t j) {
  if (!p.dropout.threshold) return 1;
  const bool kept = draw_kept(p, head, r, j) >> j % kDrawKeys & 1;
  return kept ? 65536.0 / (65536 - p.dropout.threshold) : 0;
}

template <class S>
PYATTN_KERNEL(kPlainThreads)
plain_forward(const __grid_constant__ ForwardParams p) {
  const PlainItem item(p, p.seqlen_q * group_size(p));
  if (!item.there) return;
  const HeadRows head(p, item.head);
  const int64_t r = item.place, visible = head.visible_keys(r);
  const PlainRow q(head.row<const double>(p.q, r), p.head_dim);
  PlainRow out;
  double row_max = kNegInf, row_sum = 0;
  for (int64_t j = 0; j < visible; ++j) {
    const double score = p.softmax_scale * q.dot({head.key<const double>(p.k, j), p.head_dim});
    const double most = score > row_max ? score : row_max, shift = most == kNegInf ? 0 : most;
    const double decay = exp(row_max - shift), weight = exp(score - shift);
    row_max = most, row_sum = row_sum * decay + weight;
    for (double& x : out.column) x *= decay;
    out.add(weight * dropout_factor(p, head, r, j), {head.key<const double>(p.v, j), p.head_dim_v});
  }
  out.store(head.row<double>(p.out, r), p.head_dim_v, visible ? 1 / row_sum : 0);
  if (lane() != 0) return;
  const int64_t at = head.index(p, r);
  static_cast<double*>(p.row_max)[at] = row_max, static_cast<double*>(p.row_sum)[at] = row_sum;
  static_cast<double*>(p.lse)[at] = row_max + log(row_sum);
}

// What backward reads of a row, and with a key makes of it.
struct PlainGradient {
  PlainRow q, dout;
  double row_max, row_sum, delta, dlse, weight, ds;

  PYATTN_DEVICE PlainGradient(const BackwardParams& p, const HeadRows& head, int64_t r)
      : q(head.row<const double>(p.q, r), p.head_dim), dout(head.row<const double>(p.dout, r), p.head_dim_v) {
    const int64_t at = head.index(p, r);
    row_max = static_cast<const double*>(p.row_max)[at], row_sum = static_cast<const double*>(p.row_sum)[at];
    dlse = p.dlse ? static_cast<const double*>(p.dlse)[at] : 0;
    delta = dout.dot({head.row<const double>(p.out, r), p.head_dim_v});
  }

  PYATTN_DEVICE void meet(const BackwardParams& p, const PlainRow& k, const PlainRow& v, double factor) {
    const double p_ij = exp(p.softmax_scale * q.dot(k) - row_max) / row_sum;
    weight = p_ij * factor, ds = p_ij * (dout.dot(v) * factor - delta + dlse);
  }
};

template <class S>
PYATTN_KERNEL(kPlainThreads)
plain_backward_queries(const __grid_constant__ BackwardParams p) {
  const PlainItem item(p, p.seqlen_q * group_size(p));
  if (!item.there) return;
  const HeadRows head(p, item.head);
  const int64_t r = item.place;
  PlainGradient row(p, head, r);
  PlainRow dq;
  for (int64_t j = 0; j < head.visible_keys(r); ++j) {
    const PlainRow k(head.key<const double>(p.k, j), p.head_dim), v(head.key<const double>(p.v, j), p.head_dim_v);
    row.meet(p, k, v, dropout_factor(p, head, r, j));
    dq.add(row.ds, k);
  }
  dq.store(head.row<double>(p.dq, r), p.head_dim, p.softmax_scale);
}

template <class S>
PYATTN_KERNEL(kPlainThreads)
plain_backward_keys(const __grid_constant__ BackwardParams p) {
  const PlainItem item(p, p.seqlen_k);
  if (!item.there) return;
  const HeadRows head(p, item.head);
  const int64_t j = item.place;
  const PlainRow k(head.key<const double>(p.k, j), p.head_dim), v(head.key<const double>(p.v, j), p.head_dim_v);
  PlainRow dk, dv;
  for (int64_t r = head.first_row(j); r < head.count; ++r) {
    PlainGradient row(p, head, r);
    row.meet(p, k, v, dropout_factor(p, head, r, j));
    dk.add(row.ds, row.q), dv.add(row.weight, row.dout);
  }
  dk.store(head.key<double>(p.dk, j), p.head_dim, p.softmax_scale);
  dv.store(head.key<double>(p.dv, j), p.head_dim_v, 1);
}

}  // namespace
}  // namespace pyattn::cuda
