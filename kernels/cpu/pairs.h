// Products of whole numbers of 16 bits, in pairs: two neighbouring products are added into a lane of 32 bits. Sums are exact, so their order is nobody's
// business. Beside `simd.h`, for kernels on quantised numbers; the same source is AVX2, AVX-512 (VNNI) or plain vectors.
#pragma once

#include "simd.h"

namespace agentrt {

typedef int32_t LooseInts __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/// Whole numbers below 2^22 in magnitude, nearest to x * factor, ties to even; anything where that is not finite.
inline Ints rounded(Floats x, float factor) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
    return (Ints)multiply_add(x, all(factor), all(ROUND)) - 0x4b400000;
}

inline Floats floats(Ints whole) { return __builtin_convertvector(whole, Floats); }

/// Numbers of 8 bits, 4 * LANES of them; none is beyond what those hold.
inline void store(int8_t* to, const Ints (&whole)[4]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i first = _mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]), second = _mm256_packs_epi32((__m256i)whole[2], (__m256i)whole[3]);
    const __m256i packed = _mm256_packs_epi16(first, second);  // half by half, so its fours are to be put in their order
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
    for (int i = 0; i < 4; ++i) *reinterpret_cast<Bytes*>(to + i * LANES) = __builtin_convertvector(whole[i], Bytes);
#endif
}

/// Of 16 bits, 2 * LANES of them.
inline void store(int16_t* to, Ints first, Ints second) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i packed = _mm256_packs_epi32((__m256i)first, (__m256i)second);  // half by half
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
#else
    *reinterpret_cast<Shorts*>(to) = __builtin_convertvector(first, Shorts);
    *reinterpret_cast<Shorts*>(to + LANES) = __builtin_convertvector(second, Shorts);
#endif
}

/// Neighbours as pairs: 2 * LANES numbers.
inline Ints pairs(const int16_t* from) { return *reinterpret_cast<const LooseInts*>(from); }

/// A pair, in every lane.
inline Ints all_pairs(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    const Ints zero = {};
    return zero + pair;
}

#if defined(__AVX512BW__)

/// The i-th of each as a pair: LANES numbers of 8 bits of each.
inline Ints pairs(const int8_t* first, const int8_t* second) {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first)), b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
    return (Ints)_mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)));
}

inline Ints add_products(Ints a, Ints b, Ints sum) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#endif
}

#elif defined(__AVX2__) && !defined(__AVX512F__)

inline Ints pairs(const int8_t* first, const int8_t* second) {
    const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(first)), b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(second));
    return (Ints)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
}

inline Ints add_products(Ints a, Ints b, Ints sum) { return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }

#else

inline Ints pair_of(Ints first, Ints second) { return (Ints)(((Words)first & 0xffffu) | ((Words)second << 16)); }

inline Ints pairs(const int8_t* first, const int8_t* second) {
    return pair_of(__builtin_convertvector(*reinterpret_cast<const Bytes*>(first), Ints),
                   __builtin_convertvector(*reinterpret_cast<const Bytes*>(second), Ints));
}

inline Ints add_products(Ints a, Ints b, Ints sum) { return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16); }

#endif

/// Sums of four vectors' lanes.
inline void sums_of_four(const Ints a[4], int32_t* out) {
#if defined(__AVX2__)
    __m256i v[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
        v[i] = _mm256_add_epi32(_mm512_castsi512_si256((__m512i)a[i]), _mm512_extracti64x4_epi64((__m512i)a[i], 1));
#else
        v[i] = (__m256i)a[i];
#endif
    }
    const __m256i first = _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i second = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    const __m256i halves = _mm256_add_epi32(_mm256_unpacklo_epi64(first, second), _mm256_unpackhi_epi64(first, second));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    for (int i = 0; i < 4; ++i) {
        out[i] = 0;
        for (int lane = 0; lane < LANES; ++lane) out[i] += a[i][lane];
    }
#endif
}

/// The largest lane.
inline int32_t largest(Ints lanes) {
    auto larger_of = [](Ints a, Ints b) { return a > b ? a : b; };
    if constexpr (LANES == 16) lanes = larger_of(lanes, (Ints)exchanged<8>((Floats)lanes));
    lanes = larger_of(lanes, (Ints)exchanged<4>((Floats)lanes));
    lanes = larger_of(lanes, (Ints)exchanged<2>((Floats)lanes));
    lanes = larger_of(lanes, (Ints)exchanged<1>((Floats)lanes));
    return lanes[0];
}

/// The largest magnitude, as a float's bits; NaN is above all.
inline int32_t largest_bits(const float* from, int64_t count) {
    Ints most = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Ints bits = (Ints)load(from + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return largest(most);
}

}  // namespace agentrt
