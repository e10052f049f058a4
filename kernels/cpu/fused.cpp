// What a layer does to each row by itself, in one pass each: the RMS norm with the addition before it, and the gated
// activation. Rows never meet, and a row's sums have one order, however many threads there are. Float32 or bfloat16 in
// memory, float32 in between. (Rotation and the KV write are in attention.cpp.)

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace {

using namespace agentrt;

constexpr int64_t SMALL = 40000;  // values below which a second thread costs more than it saves

template <typename T>
void norm_row(T* row, const T* added, const T* weight, T* out, int64_t width, float eps) {
    int64_t i = 0;
    Floats squares = {};
    float rest = 0;
    for (; i + LANES <= width; i += LANES) {
        Floats x = load(row + i);
        if (added) {
            store(row + i, x + load(added + i));
            x = load(row + i);  // as it was rounded
        }
        squares += x * x;
    }
    for (; i < width; ++i) {
        if (added) narrow(row + i, wide(row[i]) + wide(added[i]));
        rest += wide(row[i]) * wide(row[i]);
    }
    const float scale = 1.0f / std::sqrt((sum(squares) + rest) / float(width) + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(row + i) * scale * load(weight + i));
    for (; i < width; ++i) narrow(out + i, wide(row[i]) * scale * wide(weight[i]));
}

/// Does pieces [0, count), by so many threads; by one, without asking OpenMP, since a team may be calling each for some rows of its own.
template <class Work>
void share(int64_t count, int threads, Work work) {
    if (threads == 1) {
        for (int64_t at = 0; at < count; ++at) work(at);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t at = 0; at < count; ++at) work(at);
}

template <typename T>
void norm(T* rows, const T* added, const T* weight, T* out, int64_t count, int64_t width, int64_t stride, int64_t added_stride, float eps,
          int threads) {
    share(count, count > 1 && count * width > SMALL ? threads : 1, [=](int64_t row) {
        norm_row(rows + row * stride, added ? added + row * added_stride : nullptr, weight, out + row * width, width, eps);
    });
}

struct Silu {
    Floats operator()(Floats x) const { return x / (1.0f + exponential(-x)); }
};

/// GELU by tanh (Hendrycks and Gimpel, 2016), as the logistic function that it is: 1 + tanh loses digits below 0.
struct GeluTanh {
    Floats operator()(Floats x) const {
        const Floats twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exponential(-twice));
    }
};

template <typename T, typename Activation>
void gate_row(const T* gate, const T* up, T* out, int64_t width) {
    const Activation activation;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, activation(load(gate + i)) * load(up + i));
    for (; i < width; ++i) narrow(out + i, activation(all(wide(gate[i])))[0] * wide(up[i]));
}

template <typename T, typename Activation>
void gate(const T* fused, T* out, int64_t count, int64_t width, int64_t stride, int threads) {
    constexpr int64_t PIECE = 512;  // so that threads share a single row too
    const int64_t pieces = (width + PIECE - 1) / PIECE;
    share(count * pieces, count * width > SMALL / 4 ? threads : 1, [=](int64_t at) {
        const int64_t row = at / pieces, first = at % pieces * PIECE, length = first + PIECE < width ? PIECE : width - first;
        const T* from = fused + row * stride + first;
        gate_row<T, Activation>(from, from + width, out + row * width + first, length);
    });
}

template <typename T>
void gate(const T* fused, T* out, int64_t count, int64_t width, int64_t stride, int kind, int threads) {
    if (kind == 0)
        gate<T, Silu>(fused, out, count, width, stride, threads);
    else
        gate<T, GeluTanh>(fused, out, count, width, stride, threads);
}

}  // namespace

extern "C" {

/// Adds `added` to the rows in place, if it is not null, and norms them: out = row / sqrt(mean(row^2) + eps) * weight.
///
/// rows, added [count, width], strides in elements; weight [width]; out [count, width], dense; all float32, or all bfloat16.
void agentrt_rms_norm(void* rows, const void* added, const void* weight, void* out, int64_t count, int64_t width, int64_t stride,
                      int64_t added_stride, float eps, int bfloat16, int threads) {
    if (bfloat16)
        norm((Bfloat16*)rows, (const Bfloat16*)added, (const Bfloat16*)weight, (Bfloat16*)out, count, width, stride, added_stride, eps, threads);
    else
        norm((float*)rows, (const float*)added, (const float*)weight, (float*)out, count, width, stride, added_stride, eps, threads);
}

/// out [count, width] = activation(first half of a row of fused [count, 2 width]) * second half.
///
/// kind 0: SiLU; 1: GELU by tanh.
void agentrt_gate(const void* fused, void* out, int64_t count, int64_t width, int64_t stride, int kind, int bfloat16, int threads) {
    if (bfloat16)
        gate((const Bfloat16*)fused, (Bfloat16*)out, count, width, stride, kind, threads);
    else
        gate((const float*)fused, (float*)out, count, width, stride, kind, threads);
}
}
