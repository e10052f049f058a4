// Linear layers with weights of 4 or 8 bits and activations of 8 bits: y = dequantised(x) times dequantised(W), plus bias.
//
// Weights and activations are quantised in groups of 32 along the input. A weight is scale * q + minimum (4 bits, q from
// 0 to 15) or scale * q (8 bits, q from -127 to 127); an activation is scale * q with a scale of its own row and group.
// At 4 bits a sum of products is that of q - 8, so that it fits 16 bits and needs no minimum where that is -8 * scale.
// Products within a group are summed exactly, in integers; groups are added in float32, always in the same order. So a
// row's result is the same, bit for bit, alone and in any company, and on any number of threads.
//
// Outputs are the vector's lanes: 16 or 32 of them make a block, and a group of a block lies in one piece of memory,
//
//     scale[outputs] (float16 or float32), minimum[outputs] (the same; if there are any), q[steps][outputs][inputs of a step]
//
// where at 4 bits the first half of the steps are the low halves of the bytes of which the second half are the high ones.
// The inputs of a step, four or two, are those that an instruction multiplies and adds; an activation's are broadcast to all lanes.
//
// Rows are taken a few at a time, a tile, so that a weight is unpacked once for them. First the integer sums of some groups
// are made and put aside, then they become floats, are scaled and added: each of the two keeps the processor busy by
// itself, where taking turns group by group they would wait for each other. So many groups that most matrices' fit: beginning
// and ending costs a tile as much as several groups do.
//
// The dot product of one group is written three times: AVX-512 with VNNI, AVX2, and plain C. Its model in Python, which
// says the same in float32, is `reference` in kernels/quantized_linear.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32;  // weights that share a scale

// Rows for a thread from which threads share rows, not outputs: then none waits for another's activations.
constexpr int64_t MANY = 32;

// Bytes that weights are asked for ahead of their use; not a multiple of 4096, at which caches take one address for another.
constexpr size_t AHEAD = 2048;

// Bytes of activations that a thread goes through the weights with: they and a few blocks fit its cache.
constexpr int64_t CHUNK = 112 * 1024;

// ---- lanes: WIDTH floats, one for each of neighbouring outputs -----------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define ISA "AVX-512 VNNI"
#define ISA_VNNI
constexpr int WIDTH = 16;
constexpr int TILE = 8;      // rows at once, at most: what the registers hold
constexpr int TOGETHER = 4;  // inputs of a step
constexpr int PANEL = 1;     // groups whose sums are put aside: they stay in registers
constexpr int TOTALS = 8;    // vectors of totals that sums are added to at once
constexpr int outputs_of(int) { return 16; }  // of a block, for weights of so many bits
template <int BITS>
using Sum = int32_t;

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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA "AVX2"
#define ISA_AVX2
constexpr int WIDTH = 8;
constexpr int TILE = 6;
constexpr int TOGETHER = 2;
constexpr int PANEL = 32;
constexpr int TOTALS = 12;
constexpr int outputs_of(int bits) { return bits == 4 ? 32 : 16; }
template <int BITS>
using Sum = std::conditional_t<BITS == 8, int32_t, int16_t>;

struct Lanes {
    __m256 v;
};
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Lanes load(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Lanes load(const int32_t* p) { return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Lanes load(const int16_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store(float* p, Lanes a) { _mm256_storeu_ps(p, a.v); }
inline Lanes zeros() { return {_mm256_setzero_ps()}; }
inline Lanes scaled(Lanes a, float s) { return {_mm256_mul_ps(a.v, _mm256_set1_ps(s))}; }
inline Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes fma(Lanes a, float s, Lanes c) { return {_mm256_fmadd_ps(a.v, _mm256_set1_ps(s), c.v)}; }

// Says that the value is needed here, in a register: gcc would else compute all products first, spill them and add them at
// the end, and load weights anew for each row.
inline void keep(__m256i& value) { asm("" : "+x"(value)); }
inline void keep(Lanes& value) { asm("" : "+x"(value.v)); }

#else
#define ISA "plain C"
constexpr int WIDTH = 16;
constexpr int TILE = 4;
constexpr int TOGETHER = 2;
constexpr int PANEL = 1;
constexpr int TOTALS = 4;
constexpr int outputs_of(int) { return 16; }
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
#endif

// ---- activations -----------------------------------------------------------------------------------------------------

constexpr int STEPS = GROUP / TOGETHER;  // of a group
#if defined(ISA_AVX2)
constexpr int Q_BYTES = 2 * GROUP;  // of a row's group: with weights of 4 bits each pair of bytes twice, with weights of 8 bits in 16 bits
#else
constexpr int Q_BYTES = GROUP;
#endif

// Rows quantised to 8 bits for weights of 4 or of 8 bits. Memory of the calling thread, kept for its next call.
struct Activations {
    int bits = 0, groups = 0;
    std::vector<int8_t> q;       // [row][group], Q_BYTES each
    std::vector<int32_t> start;  // [row][group]: what a sum in a lane begins with
    std::vector<float> scale;    // [row][group]
    std::vector<float> total;    // [row][group]: scale * sum of q

    void resize(int64_t rows, int group_count, int weight_bits) {
        bits = weight_bits;
        groups = group_count;
        const size_t count = size_t(rows) * groups;
        if (scale.size() < count) {
            q.resize(count * Q_BYTES);
            start.resize(count);
            scale.resize(count);
            total.resize(count);
        }
    }
};

// What a lane's sum begins with, for the sum of a row's q: 4-bit weights are less by 8 than they are stored.
inline int32_t start_of(int bits, int32_t sum) {
#if defined(ISA_AVX2)  // two lanes of 16 bits, which hold every final sum and may overflow on the way there
    return bits == 4 ? int32_t(uint32_t(uint16_t(-8 * sum)) * 0x10001u) : 0;
#elif defined(ISA_VNNI)  // the instruction wants one side unsigned, so 8-bit weights get 128 added
    return sum * (bits == 4 ? -8 : -128);
#else
    return bits == 4 ? -8 * sum : 0;
#endif
}

// A group's largest magnitude becomes 127. Where something is not finite the scale is NaN, and so is the result; where the
// largest is so small that its inverse is not finite, all are 0.

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

constexpr int TURN = 8;  // groups that are quantised together

// Lane i is what comes of all lanes of v[i].
template <class Operation>
inline __m256i across(const __m256i (&v)[8], Operation operation) {
    __m256i four[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i* u = v + 4 * i;
        const __m256i a = operation(_mm256_unpacklo_epi32(u[0], u[1]), _mm256_unpackhi_epi32(u[0], u[1]));
        const __m256i b = operation(_mm256_unpacklo_epi32(u[2], u[3]), _mm256_unpackhi_epi32(u[2], u[3]));
        four[i] = operation(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    return operation(_mm256_permute2x128_si256(four[0], four[1], 0x20), _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

inline __m256i largest_of(const float* x) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256i most = _mm256_setzero_si256();  // magnitudes compare as their bits do, and NaN is above all
    for (int i = 0; i < GROUP; i += 8) most = _mm256_max_epi32(most, _mm256_castps_si256(_mm256_and_ps(_mm256_loadu_ps(x + i), magnitude)));
    return most;
}

inline __m256i rounded(const float* x, float inverse) {
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i * 8), _mm256_set1_ps(inverse)));
    // Packing works in halves of a vector; the permutation puts the fours back in their order.
    const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Writes q as the dot products for weights of so many bits read it.
inline void write_q(__m256i q, int bits, int8_t* to) {
    auto write = [](int8_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); };
#if defined(ISA_AVX2)
    if (bits == 4) {
        const __m256i first = _mm256_unpacklo_epi16(q, q), second = _mm256_unpackhi_epi16(q, q);
        write(to, _mm256_permute2x128_si256(first, second, 0x20));
        write(to + 32, _mm256_permute2x128_si256(first, second, 0x31));
    } else {
        write(to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)));
        write(to + 32, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1)));
    }
#else
    (void)bits;
    write(to, q);
#endif
}

// TURN groups at most, whole ones.
void quantise_groups(const float* x, int count, Activations& to, size_t at) {
    alignas(32) float inverse[TURN], scale[TURN];
    alignas(32) int32_t finite[TURN], sum[TURN];
    __m256i lanes[TURN] = {};
    for (int group = 0; group < count; ++group) lanes[group] = largest_of(x + group * GROUP);
    const __m256i most = across(lanes, [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); });
    const __m256i known = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), most);
    const __m256 largest = _mm256_castsi256_ps(most), full = _mm256_set1_ps(127.0f);
    const __m256 inverses = _mm256_div_ps(full, largest), limit = _mm256_set1_ps(std::numeric_limits<float>::max());
    const __m256 nan = _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN());
    _mm256_store_ps(inverse, _mm256_and_ps(inverses, _mm256_cmp_ps(inverses, limit, _CMP_LE_OQ)));
    _mm256_store_ps(scale, _mm256_blendv_ps(nan, _mm256_div_ps(largest, full), _mm256_castsi256_ps(known)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(finite), known);
    for (int group = 0; group < count; ++group) {
        const __m256i q = _mm256_and_si256(rounded(x + group * GROUP, inverse[group]), _mm256_set1_epi32(finite[group]));
        write_q(q, to.bits, &to.q[(at + group) * Q_BYTES]);
        lanes[group] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    }
    const __m256i sums = across(lanes, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
    _mm256_store_si256(reinterpret_cast<__m256i*>(sum), sums);
    for (int group = 0; group < count; ++group) {
        to.scale[at + group] = scale[group];
        to.start[at + group] = start_of(to.bits, sum[group]);
        to.total[at + group] = scale[group] * float(sum[group]);
    }
}

#else

constexpr int TURN = 1;

void quantise_groups(const float* x, int, Activations& to, size_t at) {
    int32_t bits[GROUP], most = 0, sum = 0;
    std::memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; ++i) most = std::max(most, bits[i] & 0x7fffffff);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const bool finite = most < 0x7f800000;
    const float inverse = finite && 127.0f / largest <= std::numeric_limits<float>::max() ? 127.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; ++i) {
        const int32_t value = inverse > 0 ? int32_t(std::nearbyint(x[i] * inverse)) : 0;
        to.q[at * Q_BYTES + i] = int8_t(value);
        sum += value;
    }
    to.scale[at] = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    to.start[at] = start_of(to.bits, sum);
    to.total[at] = to.scale[at] * float(sum);
}

#endif

void quantise_row(const float* x, int64_t inputs, Activations& to, int64_t row) {
    const int whole = int(inputs / GROUP), rest = int(inputs % GROUP);
    const size_t at = size_t(row) * to.groups;
    for (int group = 0; group < whole; group += TURN) quantise_groups(x + group * GROUP, std::min(TURN, whole - group), to, at + group);
    if (rest) {
        float padded[GROUP] = {};
        std::memcpy(padded, x + whole * GROUP, sizeof(float) * rest);
        quantise_groups(padded, 1, to, at + whole);
    }
}

// ---- the dot products of one group: ROWS rows with the outputs of a block ----------------------------------------------

// A tile's activations: rows apart by so many groups.
struct Rows {
    const int8_t* q;
    const int32_t* start;
    const float *scale, *total;
    size_t stride;
    Rows from(int group) const { return {q + group * Q_BYTES, start + group, scale + group, total + group, stride}; }
    const void* inputs(int row, int step) const { return q + row * stride * Q_BYTES + step * (Q_BYTES / STEPS); }
};

#if defined(ISA_VNNI)

template <int BITS, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows& x, int32_t (&result)[ROWS][OUTPUTS]) {
    __m512i sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = _mm512_set1_epi32(x.start[r * x.stride]);
    auto step = [&](int t, __m512i w) {
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, x.inputs(r, t), 4);
            sums[r] = _mm512_dpbusd_epi32(sums[r], w, _mm512_set1_epi32(four));
        }
    };
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80));
    if constexpr (BITS == 4) {
        for (int t = 0; t < STEPS / 2; ++t) {
            const __m512i both = _mm512_loadu_si512(weights + t * 64);
            step(t, _mm512_and_si512(both, low));
            step(t + STEPS / 2, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
    } else {
        for (int t = 0; t < STEPS; ++t) step(t, _mm512_xor_si512(_mm512_loadu_si512(weights + t * 64), sign));
    }
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_si512(result[r], sums[r]);
}

#elif defined(ISA_AVX2)

inline __m256i bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i broadcast(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

inline __m256i unpacked(__m256i both, bool upper) { return _mm256_and_si256(upper ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15)); }

// One vector is two inputs of 16 outputs. The sum of 32 products of q - 8, at most 32 * 8 * 127, fits 16 bits.
template <int BITS, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows& x, int16_t (&result)[ROWS][OUTPUTS]) {
    constexpr int PARTS = OUTPUTS / 16;
    __m256i sums[ROWS][PARTS];
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) sums[r][part] = broadcast(x.start + r * x.stride);
#pragma GCC unroll 16
    for (int t = 0; t < STEPS; ++t) {
        __m256i w[PARTS], products[PARTS];
        for (int part = 0; part < PARTS; ++part) {
            w[part] = unpacked(bytes(weights + (t % (STEPS / 2) * PARTS + part) * 32), t >= STEPS / 2);
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
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) _mm256_storeu_si256(reinterpret_cast<__m256i*>(result[r] + part * 16), sums[r][part]);
}

// 8 bits are widened to 16: one vector is two inputs of eight outputs.
template <int BITS, int ROWS, int OUTPUTS>
inline void dots(const uint8_t* weights, const Rows& x, int32_t (&result)[ROWS][OUTPUTS]) {
    static_assert(BITS == 8 && OUTPUTS == 16);
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
inline void dots(const uint8_t* weights, const Rows& x, int32_t (&result)[ROWS][OUTPUTS]) {
    constexpr int LINE = OUTPUTS * TOGETHER;
    for (int r = 0; r < ROWS; ++r)
        for (int lane = 0; lane < OUTPUTS; ++lane) result[r][lane] = x.start[r * x.stride];
    for (int t = 0; t < STEPS; ++t) {
        int8_t w[LINE];
        const uint8_t* line = weights + (BITS == 4 ? t % (STEPS / 2) : t) * LINE;
        for (int i = 0; i < LINE; ++i) w[i] = int8_t(BITS == 8 ? line[i] : t < STEPS / 2 ? line[i] & 15 : line[i] >> 4);
        for (int r = 0; r < ROWS; ++r) {
            const auto* a = static_cast<const int8_t*>(x.inputs(r, t));
            for (int lane = 0; lane < OUTPUTS; ++lane)
                for (int i = 0; i < TOGETHER; ++i) result[r][lane] += int32_t(w[lane * TOGETHER + i]) * a[i];
        }
    }
}

#endif

// ---- a tile: some rows with the outputs of a block -----------------------------------------------------------------------

// How the packed weights lie.
struct Format {
    int bits;
    bool half, minima;  // whether scales are float16, not float32; whether there are minima
    int outputs() const { return outputs_of(bits); }
    int64_t blocks(int64_t all) const { return (all + outputs() - 1) / outputs(); }
    size_t scales_bytes() const { return outputs() * (half ? 2 : 4) * (minima ? 2 : 1); }
    size_t group_bytes() const { return scales_bytes() + outputs() * GROUP * bits / 8; }
};

// The same where it is known to the compiler.
template <int BITS, bool HALF, bool MINIMA>
struct Kind {
    using Scale = std::conditional_t<HALF, uint16_t, float>;
    static constexpr bool minima = MINIMA;
    static constexpr int bits = BITS, outputs = outputs_of(BITS);
    static constexpr size_t scales_bytes = outputs * sizeof(Scale) * (MINIMA ? 2 : 1), group_bytes = scales_bytes + outputs * GROUP * BITS / 8;
};

struct Output {
    float* y;            // [row][output]
    int64_t stride;      // floats from one row to the next
    const float* bias;   // [output], or null
    int64_t outputs;
};

template <class Kind>
inline void ask_ahead(const uint8_t* group) {
    for (size_t line = 0; line < Kind::group_bytes; line += 64) __builtin_prefetch(group + AHEAD + line);
}

// Sums of a group, for neighbouring vectors of outputs, scaled and added.
template <class Kind, class Sum, int ROWS, int OUTPUTS, int PARTS>
inline void add_scaled(const uint8_t* weights, const Rows& x, int group, int first, const Sum (&sums)[ROWS][OUTPUTS], Lanes (&totals)[ROWS][PARTS]) {
    for (int part = 0; part < PARTS; ++part) {
        const int at = first + part * WIDTH;
        const auto* scales = reinterpret_cast<const typename Kind::Scale*>(weights + group * Kind::group_bytes) + at;
        const Lanes scale = load(scales);
        for (int r = 0; r < ROWS; ++r) {
            const Lanes product = scaled(load(sums[r] + at), x.scale[r * x.stride + group]);
            totals[r][part] = fma(product, scale, totals[r][part]);
        }
        if constexpr (Kind::minima) {
            const Lanes minimum = fma(scale, 8.0f, load(scales + OUTPUTS));  // of q - 8
            for (int r = 0; r < ROWS; ++r) totals[r][part] = fma(minimum, x.total[r * x.stride + group], totals[r][part]);
        }
    }
}

// Totals of neighbouring vectors of outputs, written where they belong.
template <int ROWS, int PARTS>
inline void write(const Lanes (&totals)[ROWS][PARTS], int first, const Output& to) {
    for (int r = 0; r < ROWS; ++r) {
        for (int part = 0; part < PARTS; ++part) {
            const int at = first + part * WIDTH;
            store(to.y + r * to.stride + at, to.bias ? plus(totals[r][part], load(to.bias + at)) : totals[r][part]);
        }
    }
}

// Sums of some groups, for neighbouring vectors of outputs, added to what there was of them, if anything, in the order of groups.
template <class Kind, int PARTS, class Sum, int ROWS, int OUTPUTS>
void add_panel(const uint8_t* weights, const Rows& x, int groups, int first, const Sum (*sums)[ROWS][OUTPUTS], const float (*before)[OUTPUTS],
               const Output& to) {
    Lanes totals[ROWS][PARTS];
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) totals[r][part] = before ? load(before[r] + first + part * WIDTH) : zeros();
    for (int group = 0; group < groups; ++group) add_scaled<Kind>(weights, x, group, first, sums[group], totals);
    write(totals, first, to);
}

// A row of a tile, those of its outputs from `first` on that there are.
void write_row(const float* sums, int outputs, const Output& out, int64_t row, int64_t first) {
    const int64_t count = std::min<int64_t>(outputs, out.outputs - first);
    const float* bias = out.bias ? out.bias + first : nullptr;
    float* y = out.y + row * out.stride + first;
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(y + i, bias ? plus(load(sums + i), load(bias + i)) : load(sums + i));
    for (; i < count; ++i) y[i] = sums[i] + (bias ? bias[i] : 0.0f);
}

// All groups of a tile, panel after panel; of few rows all outputs at once, else some after the other, as many as there is room for.
// Inlined, since it is measurably slower as a function of its own.
template <class Kind, int ROWS>
__attribute__((always_inline)) inline void add_panels(const uint8_t* weights, Rows rows, int all, bool ask, float (*y)[Kind::outputs], const Output& end) {
    constexpr int OUTPUTS = Kind::outputs, VECTORS = OUTPUTS / WIDTH, PARTS = ROWS * VECTORS <= TOTALS ? VECTORS : std::min(VECTORS, 2);
    static_assert(ROWS * PARTS <= TOTALS && VECTORS % PARTS == 0);
    alignas(64) Sum<Kind::bits> sums[PANEL][ROWS][OUTPUTS];
    const Output between{&y[0][0], OUTPUTS, nullptr, OUTPUTS};
    for (int group = 0; group < all; group += PANEL) {
        const int groups = std::min(PANEL, all - group);
        for (int g = 0; g < groups; ++g) {
            const uint8_t* from = weights + g * Kind::group_bytes;
            if (ask) ask_ahead<Kind>(from);
            dots<Kind::bits>(from + Kind::scales_bytes, rows.from(g), sums[g]);
        }
        for (int part = 0; part < VECTORS; part += PARTS)
            add_panel<Kind, PARTS>(weights, rows, groups, part * WIDTH, sums, group ? y : nullptr, group + groups < all ? between : end);
        weights += groups * Kind::group_bytes;
        rows = rows.from(groups);
    }
}

// The same, group by group, if the registers have room for what has been added so far.
template <class Kind, int ROWS>
void add_groups(const uint8_t* weights, const Rows& rows, int all, bool ask, const Output& end) {
    constexpr int OUTPUTS = Kind::outputs;
    alignas(64) Sum<Kind::bits> sums[ROWS][OUTPUTS];
    Lanes totals[ROWS][OUTPUTS / WIDTH];
    for (auto& row : totals)
        for (Lanes& part : row) part = zeros();
    for (int group = 0; group < all; ++group) {
        const uint8_t* from = weights + group * Kind::group_bytes;
        if (ask) ask_ahead<Kind>(from);
        dots<Kind::bits>(from + Kind::scales_bytes, rows.from(group), sums);
        add_scaled<Kind>(weights, rows, group, 0, sums, totals);
    }
    write(totals, 0, end);
}

template <class Kind, int ROWS>
void tile(const uint8_t* weights, const Activations& x, int64_t row, const Output& out, int64_t first) {
    constexpr int OUTPUTS = Kind::outputs;
    alignas(64) float y[ROWS][OUTPUTS];
    const bool whole = first + OUTPUTS <= out.outputs;  // else the block has outputs that there are not
    const Output end = whole ? Output{out.y + row * out.stride + first, out.stride, out.bias ? out.bias + first : nullptr, OUTPUTS}
                             : Output{&y[0][0], OUTPUTS, nullptr, OUTPUTS};
    const size_t at = size_t(row) * x.groups;
    const Rows rows{&x.q[at * Q_BYTES], &x.start[at], &x.scale[at], &x.total[at], size_t(x.groups)};
    const bool ask = !row;  // the tiles after the first find a block's weights where it left them
    if constexpr (PANEL == 1)
        add_groups<Kind, ROWS>(weights, rows, x.groups, ask, end);
    else
        add_panels<Kind, ROWS>(weights, rows, x.groups, ask, y, end);
    if (!whole)
        for (int r = 0; r < ROWS; ++r) write_row(y[r], OUTPUTS, out, row + r, first);
}

template <class Kind, int ROWS = TILE>
void tile_of(int64_t rows, const uint8_t* weights, const Activations& x, int64_t row, const Output& out, int64_t first) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<Kind, ROWS>(weights, x, row, out, first);
        else
            tile_of<Kind, ROWS - 1>(rows, weights, x, row, out, first);
    }
}

// ---- all rows with all outputs -----------------------------------------------------------------------------------------

struct Weights {
    const uint8_t* packed;
    Format format;
    int64_t blocks;
};

// All rows with one block, in tiles of nearly the same size.
template <class Kind>
void multiply(const Activations& x, int64_t rows, const Weights& weights, const Output& out, int64_t block) {
    const uint8_t* first = weights.packed + block * x.groups * Kind::group_bytes;
    const int64_t count = (rows + TILE - 1) / TILE;
    for (int64_t t = 0, row = 0; t < count; ++t) {
        const int64_t size = (rows - row + count - t - 1) / (count - t);
        tile_of<Kind>(size, first, x, row, out, block * Kind::outputs);
        row += size;
    }
}

using Multiply = void (*)(const Activations&, int64_t, const Weights&, const Output&, int64_t);
Multiply multiply_of(Format format) {
    if (format.bits == 8) return format.half ? multiply<Kind<8, true, false>> : multiply<Kind<8, false, false>>;
    if (format.minima) return format.half ? multiply<Kind<4, true, true>> : multiply<Kind<4, false, true>>;
    return format.half ? multiply<Kind<4, true, false>> : multiply<Kind<4, false, false>>;
}

// Where the rows are.
struct Input {
    const float* x;
    int64_t stride, inputs;
    int groups() const { return int((inputs + GROUP - 1) / GROUP); }
    const float* row(int64_t index) const { return x + index * stride; }
};

// Each thread has some of the rows and all outputs, and goes through the weights with as many rows as its cache holds.
void share_rows(const Input& input, int64_t rows, const Weights& weights, const Output& out, int threads) {
    const Multiply multiply = multiply_of(weights.format);
    const int64_t most = std::max<int64_t>(CHUNK / (input.groups() * Q_BYTES) / TILE, 4) * TILE;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int thread = 0; thread < threads; ++thread) {
        static thread_local Activations x;
        const int64_t first = rows * thread / threads, end = rows * (thread + 1) / threads, chunks = (end - first + most - 1) / most;
        for (int64_t chunk = 0, row = first; chunk < chunks; ++chunk) {
            const int64_t count = (end - row + chunks - chunk - 1) / (chunks - chunk);
            x.resize(count, input.groups(), weights.format.bits);
            for (int64_t r = 0; r < count; ++r) quantise_row(input.row(row + r), input.inputs, x, r);
            const Output part{out.y + row * out.stride, out.stride, out.bias, out.outputs};
            for (int64_t block = 0; block < weights.blocks; ++block) multiply(x, count, weights, part, block);
            row += count;
        }
    }
}

// Each thread has all rows and some of the outputs.
void share_outputs(const Input& input, int64_t rows, const Weights& weights, const Output& out, int threads) {
    const Multiply multiply = multiply_of(weights.format);
    static thread_local Activations kept;
    Activations& x = kept;
    x.resize(rows, input.groups(), weights.format.bits);
    const bool few = rows <= 2;  // then waiting for each other would take longer than doing it
    if (few)
        for (int64_t row = 0; row < rows; ++row) quantise_row(input.row(row), input.inputs, x, row);
#pragma omp parallel num_threads(threads)
    {
        if (!few) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) quantise_row(input.row(row), input.inputs, x, row);
        }
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < weights.blocks; ++block) multiply(x, rows, weights, out, block);
    }
}

template <class Scale>
void pack_block(Format format, const uint8_t* q, const Scale* scale, const Scale* minimum, int64_t outputs, int64_t groups, int64_t block,
                uint8_t* to) {
    const int lanes = format.outputs(), line = lanes * TOGETHER;
    for (int64_t group = 0; group < groups; ++group, to += format.group_bytes()) {
        std::memset(to, 0, format.group_bytes());
        auto* scales = reinterpret_cast<Scale*>(to);
        uint8_t* bytes = to + format.scales_bytes();
        for (int lane = 0; lane < lanes && block * lanes + lane < outputs; ++lane) {
            const int64_t at = (block * lanes + lane) * groups + group;
            scales[lane] = scale[at];
            if (format.minima) scales[lanes + lane] = minimum[at];
            for (int i = 0; i < GROUP; ++i) {
                const int step = i / TOGETHER, place = lane * TOGETHER + i % TOGETHER;
                const uint8_t value = q[at * GROUP + i];
                if (format.bits == 4)
                    bytes[step % (STEPS / 2) * line + place] |= step < STEPS / 2 ? value : uint8_t(value << 4);
                else
                    bytes[step * line + place] = value;
            }
        }
    }
}

}  // namespace

extern "C" {

// The instructions that this library was compiled for.
const char* linear_isa() { return ISA; }

// Bytes of a packed weight. minima: whether it has them; 4-bit weights without have minima of -8 times their scales.
int64_t linear_packed_bytes(int64_t outputs, int64_t groups, int bits, int half, int minima) {
    const Format format{bits, half != 0, minima != 0};
    return format.blocks(outputs) * groups * int64_t(format.group_bytes());
}

// q: a byte for each weight, [output][group][32]. scale, minimum: [output][group], float16 if half, else float32; minimum
// may be null.
void linear_pack(const uint8_t* q, const void* scale, const void* minimum, int64_t outputs, int64_t groups, int bits,
                 int half, uint8_t* packed, int threads) {
    const Format format{bits, half != 0, minimum != nullptr};
    const int64_t blocks = format.blocks(outputs);
    const int64_t size = groups * int64_t(format.group_bytes());
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        if (half)
            pack_block(format, q, static_cast<const uint16_t*>(scale), static_cast<const uint16_t*>(minimum), outputs, groups, block,
                       packed + block * size);
        else
            pack_block(format, q, static_cast<const float*>(scale), static_cast<const float*>(minimum), outputs, groups, block,
                       packed + block * size);
    }
}

// x: [rows][inputs], rows x_stride floats apart. y: [rows][outputs], rows y_stride floats apart. bias: [outputs] or null.
void linear_run(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half, int minima,
                const float* bias, float* y, int64_t y_stride, int64_t outputs, int threads) {
    const Input input{x, x_stride, inputs};
    const Format format{bits, half != 0, minima != 0};
    const Weights weights{packed, format, format.blocks(outputs)};
    const Output out{y, y_stride, bias, outputs};
    if (rows >= MANY * threads)
        share_rows(input, rows, weights, out, threads);
    else
        share_outputs(input, rows, weights, out, threads);
}

}  // extern "C"
