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

/// Less zero, and not plus it: that compiles to a broadcast, where -0 + 0 would have to be added.
inline Floats all(float value) {
    const Floats zero = {};
    return value - zero;
}

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }

inline Floats load(const Bfloat16* from) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
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

inline Floats larger(Floats a, Floats b) { return (a > b) ? a : b; }

inline float sum(Floats lanes) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
    return total;
}

inline float largest(Floats lanes) {
    float most = lanes[0];
    for (int lane = 1; lane < LANES; ++lane) most = lanes[lane] > most ? lanes[lane] : most;
    return most;
}

/// e^x to about 1e-7 of it: 2^n times a polynomial on the rest (the coefficients are those of Cephes' expf, S. Moshier).
/// 0 below -87.3, where floats lose digits, so minus infinity gives 0; infinity above 88.3; NaN gives NaN.
inline Floats exponential(Floats x) {
    constexpr float LEAST = -87.3f, MOST = 88.3f, ROUND = 12582912.0f;
    const Floats inside = (x < LEAST) ? all(LEAST) : ((x > MOST) ? all(MOST) : x);
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

/// tanh to about 1e-7 absolutely; NaN gives NaN.
inline Floats hyperbolic_tangent(Floats x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

/// Sums of four vectors' lanes, each always in the same order.
inline void sums_of_four(const Floats a[4], float* out) {
#if defined(__AVX__)
    __m256 half[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
        const __m512 whole = (__m512)a[i];
        half[i] = _mm512_castps512_ps256(whole) + _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1));
#else
        half[i] = (__m256)a[i];
#endif
    }
    const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm256_castps256_ps128(pairs) + _mm256_extractf128_ps(pairs, 1));
#else
    for (int i = 0; i < 4; ++i) out[i] = sum(a[i]);
#endif
}

}  // namespace agentrt
