// The vectors of `linear.cpp`: WIDTH floats, one for each of neighbouring outputs, and what an instruction set makes of blocks and tiles. Written three
// times: AVX-512 with VNNI, AVX2, and plain C. No kernel lives here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace agentrt {
namespace {

constexpr int GROUP = 32;  // weights that share a scale
constexpr int halves_of(int bits) { return bits == 6 ? 2 : 1; }  // parts of a group with sums of their own

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define ISA_WITHOUT_TILES "AVX-512 VNNI"
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define ISA "AVX-512 VNNI and AMX"
#define HAS_TILES
#else
#define ISA ISA_WITHOUT_TILES
#endif
#define ISA_VNNI
constexpr int WIDTH = 16;
constexpr int TILE = 8;    // rows at once, at most: what the registers hold
constexpr int PANEL = 1;   // groups whose sums are put aside: they stay in registers
constexpr int TOTALS = 8;  // vectors of totals that sums are added to at once
constexpr int outputs_of(int) { return 16; }  // of a block, for weights of so many bits
constexpr int together_of(int) { return 4; }  // inputs of a step
template <int BITS>
using Sum = std::conditional_t<BITS == 6, float, int32_t>;

struct Lanes {
    __m512 v;
};
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Lanes load(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes scaled(Lanes a, float s) { return {_mm512_mul_ps(a.v, _mm512_set1_ps(s))}; }
inline Lanes plus(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes fma(Lanes a, float s, Lanes c) { return {_mm512_fmadd_ps(a.v, _mm512_set1_ps(s), c.v)}; }
inline void keep(Lanes&) {}

// Bits of each byte, moved down; the mask is those that are left.
inline __m512i bits_of(__m512i bytes, int down, int mask) { return _mm512_and_si512(_mm512_srli_epi16(bytes, down), _mm512_set1_epi8(char(mask))); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA "AVX2"
#define ISA_AVX2
constexpr int WIDTH = 8;
constexpr int TILE = 6;
constexpr int PANEL = 32;
constexpr int TOTALS = 12;
constexpr int outputs_of(int bits) { return bits == 4 ? 32 : 16; }
constexpr int together_of(int bits) { return bits == 5 || bits == 6 ? 4 : 2; }
struct Pair {
    int16_t first, second;  // a sum in two parts
};
template <int BITS>
using Sum = std::conditional_t<BITS == 4, int16_t, std::conditional_t<BITS == 5, Pair, int32_t>>;

struct Lanes {
    __m256 v;
};
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Lanes load(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Lanes load(const int32_t* p) { return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Lanes load(const int16_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Lanes load(const Pair* p) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_madd_epi16(both, _mm256_set1_epi16(1)))};
}
inline void store(float* p, Lanes a) { _mm256_storeu_ps(p, a.v); }
inline Lanes zeros() { return {_mm256_setzero_ps()}; }
inline Lanes scaled(Lanes a, float s) { return {_mm256_mul_ps(a.v, _mm256_set1_ps(s))}; }
inline Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes fma(Lanes a, float s, Lanes c) { return {_mm256_fmadd_ps(a.v, _mm256_set1_ps(s), c.v)}; }

inline __m256i bits_of(__m256i bytes, int down, int mask) { return _mm256_and_si256(_mm256_srli_epi16(bytes, down), _mm256_set1_epi8(char(mask))); }

// Says that the value is needed here, in a register: gcc would else compute all products first, spill them and add them at
// the end, and load weights anew for each row.
inline void keep(__m256i& value) { asm("" : "+x"(value)); }
inline void keep(Lanes& value) { asm("" : "+x"(value.v)); }

#else
#define ISA_WITHOUT_TILES "plain C"
#if defined(TILES_IN_C)
#define ISA "plain C and tiles in C"
#define HAS_TILES
#else
#define ISA ISA_WITHOUT_TILES
#endif
constexpr int WIDTH = 16;
constexpr int TILE = 4;
constexpr int PANEL = 1;
constexpr int TOTALS = 4;
constexpr int outputs_of(int) { return 16; }
constexpr int together_of(int) { return 4; }
template <int BITS>
using Sum = int32_t;

struct Lanes {
    float v[WIDTH];
};
float from_half(uint16_t h) {
    const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023u;
    float value = exponent ? std::ldexp(float(fraction | 1024u), int(exponent) - 25) : std::ldexp(float(fraction), -24);
    if (exponent == 31) value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return h & 0x8000 ? -value : value;
}
inline float from_half(float f) { return f; }
inline float from_half(int32_t whole) { return float(whole); }
template <class Function>
inline Lanes each(Function f) {
    Lanes a;
    for (int lane = 0; lane < WIDTH; ++lane) a.v[lane] = f(lane);
    return a;
}
template <class Number>
inline Lanes load(const Number* p) {
    return each([=](int lane) { return from_half(p[lane]); });
}
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.v, sizeof a.v); }
inline Lanes zeros() {
    return each([](int) { return 0.0f; });
}
inline Lanes scaled(const Lanes& a, float s) {
    return each([&](int lane) { return a.v[lane] * s; });
}
inline Lanes plus(const Lanes& a, const Lanes& b) {
    return each([&](int lane) { return a.v[lane] + b.v[lane]; });
}
inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
    return each([&](int lane) { return a.v[lane] * b.v[lane] + c.v[lane]; });
}
inline Lanes fma(const Lanes& a, float s, const Lanes& c) {
    return each([&](int lane) { return a.v[lane] * s + c.v[lane]; });
}
inline void keep(Lanes&) {}
inline uint8_t bits_of(uint8_t byte, int down, int mask) { return uint8_t(byte >> down & mask); }
#endif

constexpr int steps_of(int bits) { return GROUP / halves_of(bits) / together_of(bits); }  // of what is summed at once

}  // namespace
}  // namespace agentrt
