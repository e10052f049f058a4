// Vectors of floats for the kernels of this folder: as wide as the processor has them, in the compiler's own vector
// types, so that the same source is AVX2, AVX-512, or whatever a compiler makes of it elsewhere. No kernel lives here.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace agentrt {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

/// A bfloat16 in memory: the upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

/// A float16 in memory; what is beyond its range is stored as its largest value, so that nothing finite becomes infinite.
struct Float16 {
    uint16_t bits;
};
constexpr float MOST_FLOAT16 = 65504.0f;

/// Less zero, and not plus it: that compiles to a broadcast, where -0 + 0 would have to be added.
inline Floats all(float value) {
    const Floats zero = {};
    return value - zero;
}

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }

inline Floats load(const Bfloat16* from) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}

/// As bits, for processors that do not convert: the exponent is moved by a multiplication, which is exact for small values too.
inline Floats float16_bits(Words bits) {
    const Words magnitude = (bits & 0x7fffu) << 13;
    const Words infinite = magnitude >= (255u - 112u) << 23 ? magnitude | 0x7f800000u : (Words)((Floats)magnitude * 0x1p112f);
    return (Floats)(infinite | ((bits & 0x8000u) << 16));
}

inline Floats load(const Float16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    return float16_bits(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words));
#endif
}

inline void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }

/// Rounded to nearest, ties to even, as torch does; a NaN stays one.
inline void store(Bfloat16* to, Floats value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words quiet = {};
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector((value == value) ? rounded : quiet + 0x7fc0u, Halves);
}

inline float wide(float value) { return value; }

inline float wide(Bfloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline void narrow(float* to, float value) { *to = value; }

inline void narrow(Bfloat16* to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value == value ? uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7fc0u);
}

inline float wide(Float16 value) {
    const Words bits = {value.bits};
    return float16_bits(bits)[0];
}

/// Rounded to nearest, ties to even.
inline void narrow(Float16* to, float value) {
    uint32_t bits, sign;
    std::memcpy(&bits, &value, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    float magnitude = value < 0 ? -value : value;
    if (magnitude > MOST_FLOAT16) magnitude = MOST_FLOAT16;
    std::memcpy(&bits, &magnitude, sizeof bits);
    if (value != value)
        bits = 0x7e00u;
    else if (magnitude < 0x1p-14f)
        bits = uint32_t(magnitude * 0x1p24f + 8388608.0f - 8388608.0f);  // the addition rounds to a whole number
    else
        bits = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    to->bits = uint16_t(sign | bits);
}

inline void store(Float16* to, Floats value) {
#if defined(__AVX512F__) || defined(__F16C__)
    const Floats most = all(MOST_FLOAT16);
    value = (value > most) ? most : ((value < -most) ? -most : value);
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
#else
    for (int lane = 0; lane < LANES; ++lane) narrow(to + lane, value[lane]);
#endif
}

/// a * b + c, rounded once where the processor can; the same everywhere in a library, whatever a compiler would contract.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/// The same, in a register from here on: compilers would else load a value that is used three times from memory three times.
inline Floats held(Floats value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__AVX__)
    asm("" : "+x"(value));
#endif
    return value;
}

inline Floats larger(Floats a, Floats b) { return (a > b) ? a : b; }

/// The lanes of a vector, those `APART` from each other exchanged.
template <int APART>
inline Floats exchanged(Floats lanes) {
#if defined(__clang__) && defined(__AVX512F__)
    return __builtin_shufflevector(lanes, lanes, 0 ^ APART, 1 ^ APART, 2 ^ APART, 3 ^ APART, 4 ^ APART, 5 ^ APART, 6 ^ APART, 7 ^ APART,
                                   8 ^ APART, 9 ^ APART, 10 ^ APART, 11 ^ APART, 12 ^ APART, 13 ^ APART, 14 ^ APART, 15 ^ APART);
#elif defined(__clang__)
    return __builtin_shufflevector(lanes, lanes, 0 ^ APART, 1 ^ APART, 2 ^ APART, 3 ^ APART, 4 ^ APART, 5 ^ APART, 6 ^ APART, 7 ^ APART);
#else
    Ints from;
    for (int lane = 0; lane < LANES; ++lane) from[lane] = lane ^ APART;
    return __builtin_shuffle(lanes, from);
#endif
}

inline float sum(Floats lanes) {
    if constexpr (LANES == 16) lanes += exchanged<8>(lanes);
    lanes += exchanged<4>(lanes);
    lanes += exchanged<2>(lanes);
    lanes += exchanged<1>(lanes);
    return lanes[0];
}

inline float largest(Floats lanes) {
    if constexpr (LANES == 16) lanes = larger(lanes, exchanged<8>(lanes));
    lanes = larger(lanes, exchanged<4>(lanes));
    lanes = larger(lanes, exchanged<2>(lanes));
    lanes = larger(lanes, exchanged<1>(lanes));
    return lanes[0];
}

/// e^x to about 1e-7 of it: 2^n times a polynomial on the rest (the coefficients are those of Cephes' expf, S. Moshier).
/// 0 below -87.3, where floats lose digits, so minus infinity gives 0; infinity above 88.3; NaN gives NaN.
__attribute__((always_inline)) inline Floats exponential(Floats x) {
    constexpr float LEAST = -87.3f, MOST = 88.3f, ROUND = 12582912.0f;
    const Floats least = all(LEAST), most = all(MOST);
    Floats inside = (least > x) ? least : x;  // in this order a NaN stays
    inside = (most < inside) ? most : inside;
    const Floats n = (inside * 1.44269504088896341f + ROUND) - ROUND;
    const Floats rest = (inside - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * (rest * rest) + rest + 1.0f;
    const Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    const Floats value = p * scale;
    return (x < LEAST) ? all(0.0f) : ((x > MOST) ? all(__builtin_inff()) : value);
}

/// e^x in place of each x, which is at most 0, to about 2e-7 of it: 2^n times a polynomial on the rest (fitted to 2^rest by least squares). Nothing
/// gets less than 1e-38, NaN gives NaN. A step is done for all of them before the next, since each waits for the one before.
template <int COUNT>
__attribute__((always_inline)) inline void exponentials(Floats (&x)[COUNT]) {
    constexpr float LEAST = -87.3f, LOG2_E = 1.44269504088896341f, ROUND = 12582912.0f;
    constexpr float FACTORS[] = {1.537070482e-04f, 1.339984829e-03f, 9.618373251e-03f, 5.550329035e-02f, 2.402264846e-01f, 6.931472056e-01f, 1.0f};
    const Floats least = all(LEAST), log2_e = all(LOG2_E), round = all(ROUND);
    Floats moved[COUNT], value[COUNT];
    for (int i = 0; i < COUNT; ++i) x[i] = (least > x[i]) ? least : x[i];  // in this order a NaN stays
    for (int i = 0; i < COUNT; ++i) moved[i] = multiply_add(x[i], log2_e, round);
    for (int i = 0; i < COUNT; ++i) x[i] = multiply_add(x[i], log2_e, round - moved[i]);
    for (int i = 0; i < COUNT; ++i) value[i] = all(FACTORS[0]);
    for (int factor = 1; factor < 7; ++factor)
        for (int i = 0; i < COUNT; ++i) value[i] = multiply_add(value[i], x[i], all(FACTORS[factor]));
    for (int i = 0; i < COUNT; ++i) x[i] = value[i] * (Floats)(((Ints)moved[i] << 23) + (127 << 23));
}

/// tanh to about 1e-7 absolutely; NaN gives NaN.
inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

/// Sums of four vectors' lanes, each in this order: four lanes one after the other, the next four, and so on, then these sums one after the other.
inline void sums_of_four(const Floats a[4], float* out) {
#if defined(__AVX512F__)
    const __m512 first = _mm512_unpacklo_ps((__m512)a[0], (__m512)a[1]), second = _mm512_unpackhi_ps((__m512)a[0], (__m512)a[1]);
    const __m512 third = _mm512_unpacklo_ps((__m512)a[2], (__m512)a[3]), fourth = _mm512_unpackhi_ps((__m512)a[2], (__m512)a[3]);
    const __m512 fours = _mm512_shuffle_ps(first, third, 0x44) + _mm512_shuffle_ps(first, third, 0xee) + _mm512_shuffle_ps(second, fourth, 0x44) +
                         _mm512_shuffle_ps(second, fourth, 0xee);
    _mm_storeu_ps(out, _mm512_extractf32x4_ps(fours, 0) + _mm512_extractf32x4_ps(fours, 1) + _mm512_extractf32x4_ps(fours, 2) +
                           _mm512_extractf32x4_ps(fours, 3));
#elif defined(__AVX__)
    const __m256 first = _mm256_unpacklo_ps((__m256)a[0], (__m256)a[1]), second = _mm256_unpackhi_ps((__m256)a[0], (__m256)a[1]);
    const __m256 third = _mm256_unpacklo_ps((__m256)a[2], (__m256)a[3]), fourth = _mm256_unpackhi_ps((__m256)a[2], (__m256)a[3]);
    const __m256 fours = _mm256_shuffle_ps(first, third, 0x44) + _mm256_shuffle_ps(first, third, 0xee) + _mm256_shuffle_ps(second, fourth, 0x44) +
                         _mm256_shuffle_ps(second, fourth, 0xee);
    _mm_storeu_ps(out, _mm256_castps256_ps128(fours) + _mm256_extractf128_ps(fours, 1));
#else
    for (int i = 0; i < 4; ++i)
        for (int lane = 0; lane < LANES; lane += 4) {
            const float four = a[i][lane] + a[i][lane + 1] + a[i][lane + 2] + a[i][lane + 3];
            out[i] = lane ? out[i] + four : four;
        }
#endif
}

/// Eight vectors as columns: lane i of vector j goes to `to[i * stride + j]`.
inline void store_columns(const Floats vectors[8], float* to, int64_t stride) {
#if defined(__AVX__)
    for (int part = 0; part < LANES / 8; ++part) {
        __m256 rows[8], pairs[8], fours[8];
        for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
            const __m512 whole = (__m512)vectors[i];
            rows[i] = part ? _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1)) : _mm512_castps512_ps256(whole);
#else
            rows[i] = (__m256)vectors[i];
#endif
        }
        for (int i = 0; i < 8; i += 2) {
            pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
            pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; ++j) {
                fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
                fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
            }
        for (int i = 0; i < 4; ++i) {
            _mm256_storeu_ps(to + (part * 8 + i) * stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
            _mm256_storeu_ps(to + (part * 8 + i + 4) * stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
        }
    }
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 8; ++j) to[i * stride + j] = vectors[j][i];
#endif
}

}  // namespace agentrt
