// The dot products of one group: ROWS rows with the outputs of a block, exact, in integers. Written three times: AVX-512 with VNNI, AVX2, and plain C.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear_activations.h"
#include "linear_lines.h"

namespace agentrt {
namespace {

// A tile's activations: rows apart by so many groups.
template <int BITS>
struct Rows {
    static constexpr int Q_BYTES = q_bytes_of(BITS), HALVES = halves_of(BITS);
    const int8_t* q;
    const int32_t* start;
    const float *scale, *total;
    size_t stride;
    Rows from(int group) const { return {q + group * Q_BYTES, start + group * HALVES, scale + group, total + group, stride}; }
    Rows half(int index) const { return {q + index * (Q_BYTES / HALVES), start + index, scale, total, stride}; }
    const int32_t* begin(int row) const { return start + row * stride * HALVES; }
    const void* inputs(int row, int step) const { return q + row * stride * Q_BYTES + step * (Q_BYTES / HALVES / steps_of(BITS)); }
};

#if defined(ISA_VNNI)

template <int BITS, int ROWS>
inline void sum_up(const uint8_t* lines, const Rows<BITS>& x, __m512i (&sums)[ROWS]) {
    constexpr int STEPS = steps_of(BITS);
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_set1_epi32(*x.begin(r));
#pragma GCC unroll 8
    for (int t = 0; t < STEPS; ++t) {
        __m512i w = unpacked<BITS>([=](int line) { return _mm512_loadu_si512(lines + line * 64); }, t);
        if (BITS == 8) w = _mm512_xor_si512(w, _mm512_set1_epi8(char(0x80)));
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, x.inputs(r, t), 4);
            sums[r] = _mm512_dpbusd_epi32(sums[r], w, _mm512_set1_epi32(four));
        }
    }
}

template <int BITS, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<BITS>& x, int32_t (&result)[ROWS][OUTPUTS]) {
    __m512i sums[ROWS];
    sum_up(weights, x, sums);
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_si512(result[r], sums[r]);
}

// Sums times factors are whole numbers below 2^24, which floats hold, and multiply faster.
template <int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<6>& x, float (&result)[ROWS][OUTPUTS]) {
    for (int half = 0; half < 2; ++half) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + half * OUTPUTS));
        const Lanes factor{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
        __m512i sums[ROWS];
        sum_up(weights + lines_at(6, OUTPUTS, half), x.half(half), sums);
        for (int r = 0; r < ROWS; ++r) store(result[r], fma(Lanes{_mm512_cvtepi32_ps(sums[r])}, factor, half ? load(result[r]) : zeros()));
    }
}

#elif defined(ISA_AVX2)

inline __m256i bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i broadcast(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// Sums of 16 bits: at 4 bits a vector is two inputs of 16 outputs, and the sum of 32 products of q - 8, at most 32 * 8 * 127, fits. At 5 bits it is four
// inputs of eight outputs, of which a lane has two: 16 products of q - 16, at most 16 * 16 * 127, fit as well, and so do, at 6 bits, 8 of q - 32.
template <int BITS, int ROWS, int PARTS>
inline void sum_up(const uint8_t* lines, const Rows<BITS>& x, __m256i (&sums)[ROWS][PARTS]) {
    constexpr int STEPS = steps_of(BITS);
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) sums[r][part] = broadcast(x.begin(r));
#pragma GCC unroll 16
    for (int t = 0; t < STEPS; ++t) {
        __m256i w[PARTS], products[PARTS];
        for (int part = 0; part < PARTS; ++part) {
            w[part] = unpacked<BITS>([=](int line) { return bytes(lines + (line * PARTS + part) * 32); }, t);
            keep(w[part]);
        }
        for (int r = 0; r < ROWS; ++r) {
            const __m256i a = broadcast(x.inputs(r, t));
            for (int part = 0; part < PARTS; ++part) products[part] = _mm256_maddubs_epi16(w[part], a);
            for (int part = 0; part < PARTS; ++part) {
                sums[r][part] = _mm256_add_epi16(sums[r][part], products[part]);
                keep(sums[r][part]);
            }
        }
    }
}

template <int BITS, class Sum, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<BITS>& x, Sum (&result)[ROWS][OUTPUTS]) {
    constexpr int PARTS = OUTPUTS * sizeof(Sum) / sizeof(__m256i);
    __m256i sums[ROWS][PARTS];
    sum_up(weights, x, sums);
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) _mm256_storeu_si256(reinterpret_cast<__m256i*>(result[r]) + part, sums[r][part]);
}

// The two lanes of a sum meet where they are multiplied by their half's factor.
template <int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<6>& x, int32_t (&result)[ROWS][OUTPUTS]) {
    constexpr int PARTS = OUTPUTS / 8;
    for (int half = 0; half < 2; ++half) {
        __m256i sums[ROWS][PARTS];
        sum_up(weights + lines_at(6, OUTPUTS, half), x.half(half), sums);
        for (int part = 0; part < PARTS; ++part) {
            const __m128i once = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(weights + half * OUTPUTS + part * 8));
            const __m256i factors = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(once, once));
            for (int r = 0; r < ROWS; ++r) {
                auto* to = reinterpret_cast<__m256i*>(result[r]) + part;
                const __m256i product = _mm256_madd_epi16(sums[r][part], factors);
                _mm256_storeu_si256(to, half ? _mm256_add_epi32(_mm256_loadu_si256(to), product) : product);
            }
        }
    }
}

// 8 bits are widened to 16: one vector is two inputs of eight outputs.
template <int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<8>& x, int32_t (&result)[ROWS][OUTPUTS]) {
    static_assert(OUTPUTS == 16);
    constexpr int STEPS = steps_of(8);
    __m256i low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm256_setzero_si256();
    auto widened = [](const uint8_t* p) {
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        keep(wide);
        return wide;
    };
#pragma GCC unroll 16
    for (int t = 0; t < STEPS; ++t) {
        const __m256i w0 = widened(weights + t * 32), w1 = widened(weights + t * 32 + 16);
        for (int r = 0; r < ROWS; ++r) {
            const __m256i a = broadcast(x.inputs(r, t));
            low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(w0, a));
            high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(w1, a));
            keep(low[r]);
            keep(high[r]);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(result[r]), low[r]);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(result[r] + 8), high[r]);
    }
}

#else

template <int BITS, int ROWS, int OUTPUTS>
inline void sum_up(const uint8_t* lines, const Rows<BITS>& x, int32_t (&sums)[ROWS][OUTPUTS]) {
    constexpr int TOGETHER = together_of(BITS), STEPS = steps_of(BITS), LINE = OUTPUTS * TOGETHER;
    for (int r = 0; r < ROWS; ++r)
        for (int lane = 0; lane < OUTPUTS; ++lane) sums[r][lane] = *x.begin(r);
    for (int t = 0; t < STEPS; ++t) {
        int8_t w[LINE];
        for (int i = 0; i < LINE; ++i) w[i] = int8_t(unpacked<BITS>([=](int line) { return lines[line * LINE + i]; }, t));
        for (int r = 0; r < ROWS; ++r) {
            const auto* a = static_cast<const int8_t*>(x.inputs(r, t));
            for (int lane = 0; lane < OUTPUTS; ++lane)
                for (int i = 0; i < TOGETHER; ++i) sums[r][lane] += int32_t(w[lane * TOGETHER + i]) * a[i];
        }
    }
}

template <int BITS, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<BITS>& x, int32_t (&result)[ROWS][OUTPUTS]) {
    sum_up(weights, x, result);
}

template <int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows<6>& x, int32_t (&result)[ROWS][OUTPUTS]) {
    std::memset(result, 0, sizeof result);
    for (int half = 0; half < 2; ++half) {
        const auto* factors = reinterpret_cast<const int8_t*>(weights) + half * OUTPUTS;
        int32_t sums[ROWS][OUTPUTS];
        sum_up(weights + lines_at(6, OUTPUTS, half), x.half(half), sums);
        for (int r = 0; r < ROWS; ++r)
            for (int lane = 0; lane < OUTPUTS; ++lane) result[r][lane] += sums[r][lane] * factors[lane];
    }
}

#endif

}  // namespace
}  // namespace agentrt
