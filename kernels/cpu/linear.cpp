// Linear layers with weights of 4 or 8 bits and activations of 8 bits: y = dequantised(x) times dequantised(W), plus bias.
//
// Weights and activations are quantised in groups of 32 along the input. A weight is scale * q + minimum (4 bits, q from
// 0 to 15) or scale * q (8 bits, q from -127 to 127); an activation is scale * q with a scale of its own row and group.
// Products within a group are summed exactly, in integers; groups are added in float32, always in the same order. So a
// row's result is the same, bit for bit, alone and in any company, and on any number of threads.
//
// Outputs are the vector's lanes: 16 of them make a block, and a group of a block lies in one piece of memory,
//
//     scale[16] (float16 or float32), minimum[16] (the same; 4 bits only), q[8 steps][16 outputs][4 inputs]
//
// where at 4 bits step t has the low halves of the bytes of which step t + 4 has the high ones. An activation's four
// bytes are then broadcast to all lanes. Rows are taken a few at a time. Where there are many, a block's halves
// are first spread to bytes, once for all rows; that changes no sum.
//
// The dot product of one group is written three times: AVX-512 with VNNI, AVX2, and plain C. Its model in Python, which
// says the same in float32, is `reference` in agentrt/models/linear.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 32;    // weights that share a scale
constexpr int LANES = 16;    // outputs of a block
constexpr int STEPS = 8;     // of four inputs, in a group

// Up to so many rows, 4-bit weights are unpacked as they are used, tile after tile; for more it pays to write them down unpacked.
constexpr int FEW = 24;

// How a group's q lie: two in a byte as they are stored, one in a byte (0 to 15), or one in a byte with a sign.
enum Form { HALVES, BYTES, SIGNED };
constexpr int form_bytes(Form form) { return LANES * GROUP / (form == HALVES ? 2 : 1); }

// ---- lanes: 16 floats, one for each output of a block ----------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define ISA "AVX-512 VNNI"
constexpr int TILE = 8;  // rows at once, at most: what the registers hold

struct Lanes {
    __m512 v;
};
inline Lanes zeros() { return {_mm512_setzero_ps()}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes scaled(Lanes a, float s) { return {_mm512_mul_ps(a.v, _mm512_set1_ps(s))}; }
inline Lanes plus(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes fma(Lanes a, float s, Lanes c) { return {_mm512_fmadd_ps(a.v, _mm512_set1_ps(s), c.v)}; }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ISA "AVX2"
constexpr int TILE = 6;

struct Lanes {
    __m256 low, high;
};
inline Lanes zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load(const uint16_t* p) {
    auto half = [](const uint16_t* q) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))); };
    return {half(p), half(p + 8)};
}
inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes scaled(Lanes a, float s) {
    const __m256 v = _mm256_set1_ps(s);
    return {_mm256_mul_ps(a.low, v), _mm256_mul_ps(a.high, v)};
}
inline Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes fma(Lanes a, float s, Lanes c) {
    const __m256 v = _mm256_set1_ps(s);
    return {_mm256_fmadd_ps(a.low, v, c.low), _mm256_fmadd_ps(a.high, v, c.high)};
}

#else
#define ISA "plain C"
constexpr int TILE = 4;

struct Lanes {
    float v[LANES];
};
float from_half(uint16_t h) {
    const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023u;
    float value = exponent ? std::ldexp(float(fraction | 1024u), int(exponent) - 25) : std::ldexp(float(fraction), -24);
    if (exponent == 31) value = fraction ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return h & 0x8000 ? -value : value;
}
inline float from_half(float f) { return f; }
template <class Function>
inline Lanes each(Function f) {
    Lanes a;
    for (int lane = 0; lane < LANES; ++lane) a.v[lane] = f(lane);
    return a;
}
inline Lanes zeros() {
    return each([](int) { return 0.0f; });
}
template <class Scale>
inline Lanes load(const Scale* p) {
    return each([=](int lane) { return from_half(p[lane]); });
}
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.v, sizeof a.v); }
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
#endif

// ---- activations -----------------------------------------------------------------------------------------------------

// Rows quantised to 8 bits. Memory of the calling thread, kept for its next call.
struct Activations {
    int groups = 0;
    std::vector<int8_t> q;        // [row][input]
    std::vector<int16_t> q16;     // [row][input], each four as 0 2 1 3: for AVX2 with weights of 8 bits, else left as it was
    bool wants_q16 = false;
    std::vector<int32_t> sum;     // [row][group], of the q
    std::vector<float> scale;     // [row][group]
    std::vector<float> total;     // [row][group]: scale * sum

    void resize(int64_t rows, int group_count) {
        groups = group_count;
        const size_t count = size_t(rows) * groups;
        if (scale.size() < count) {
            q.resize(count * GROUP);
            q16.resize(count * GROUP);
            sum.resize(count);
            scale.resize(count);
            total.resize(count);
        }
    }
};

// What one group becomes: the largest magnitude is 127. Where something is not finite the scale is NaN, and so is the
// result; where the largest is so small that its inverse is not finite, all are 0.
struct GroupScale {
    float inverse, scale;
};
inline GroupScale group_scale(int32_t largest_bits) {  // magnitudes compare as their bits do, and NaN is above all
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    if (largest_bits >= 0x7f800000) return {0.0f, std::numeric_limits<float>::quiet_NaN()};
    const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
    return {inverse <= std::numeric_limits<float>::max() ? inverse : 0.0f, largest / 127.0f};
}

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// Writes q, and q16 if it is not null; returns the sum of q; x has a whole group.
inline int32_t quantise_values(const float* x, int8_t* q, int16_t* q16, float& scale) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 v[4];
    __m256i most = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_loadu_ps(x + i * 8);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    const GroupScale found = group_scale(_mm_cvtsi128_si32(four));
    scale = found.scale;
    const __m256 inverse = _mm256_set1_ps(found.inverse);
    __m256i whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    // Packing works in halves of a vector; the permutation puts the fours back in their order.
    __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (scale != scale) packed = _mm256_setzero_si256();
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), packed);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(packed, 8), 8), odd = _mm256_srai_epi16(packed, 8);
    if (q16) {
        const __m256i first = _mm256_unpacklo_epi32(even, odd), second = _mm256_unpackhi_epi32(even, odd);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q16), _mm256_permute2x128_si256(first, second, 0x20));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(q16 + 16), _mm256_permute2x128_si256(first, second, 0x31));
    }
    const __m256i pairs = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
}

#else

inline int32_t quantise_values(const float* x, int8_t* q, int16_t* q16, float& scale) {
    int32_t bits[GROUP], largest = 0, sum = 0;
    std::memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; ++i) largest = std::max(largest, bits[i] & 0x7fffffff);
    const GroupScale found = group_scale(largest);
    scale = found.scale;
    for (int i = 0; i < GROUP; ++i) {
        const int32_t value = found.inverse > 0 ? int32_t(std::nearbyint(x[i] * found.inverse)) : 0;
        q[i] = int8_t(value);
        if (q16) q16[i / 4 * 4 + (i % 4 == 1 ? 2 : i % 4 == 2 ? 1 : i % 4)] = int16_t(value);
        sum += value;
    }
    return sum;
}

#endif

void quantise_group(const float* x, int count, Activations& to, size_t at) {
    float padded[GROUP] = {};
    if (count < GROUP) {
        std::memcpy(padded, x, sizeof(float) * count);
        x = padded;
    }
    to.sum[at] = quantise_values(x, &to.q[at * GROUP], to.wants_q16 ? &to.q16[at * GROUP] : nullptr, to.scale[at]);
    to.total[at] = to.scale[at] * float(to.sum[at]);
}

void quantise_row(const float* x, int64_t inputs, Activations& to, int64_t row) {
    for (int group = 0; group < to.groups; ++group) {
        const int64_t first = int64_t(group) * GROUP;
        quantise_group(x + first, int(std::min<int64_t>(GROUP, inputs - first)), to, size_t(row) * to.groups + group);
    }
}

// ---- the dot products of one group: ROWS rows with the 16 outputs of a block ------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)

template <Form FORM, int ROWS>
inline void dots(const uint8_t* weights, const Activations& x, size_t at, size_t stride, Lanes (&result)[ROWS]) {
    __m512i sums[ROWS];
    // Signed weights get 128 added, as the instruction wants one side unsigned; the sum starts with what that is too much.
    for (int r = 0; r < ROWS; ++r)
        sums[r] = FORM == SIGNED ? _mm512_set1_epi32(-128 * x.sum[at + r * stride]) : _mm512_setzero_si512();
    auto step = [&](int t, __m512i w) {
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, &x.q[(at + r * stride) * GROUP + t * 4], 4);
            sums[r] = _mm512_dpbusd_epi32(sums[r], w, _mm512_set1_epi32(four));
        }
    };
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(char(0x80));
    if constexpr (FORM == HALVES) {
        for (int t = 0; t < STEPS / 2; ++t) {
            const __m512i both = _mm512_loadu_si512(weights + t * 64);
            step(t, _mm512_and_si512(both, low));
            step(t + STEPS / 2, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
        }
    } else {
        for (int t = 0; t < STEPS; ++t) {
            const __m512i w = _mm512_loadu_si512(weights + t * 64);
            step(t, FORM == SIGNED ? _mm512_xor_si512(w, sign) : w);
        }
    }
    for (int r = 0; r < ROWS; ++r) result[r] = {_mm512_cvtepi32_ps(sums[r])};
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

inline __m256i bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Says that the sum is needed here: gcc would else compute all products first, spill them, and add them at the end.
inline void keep(__m256i& sum) { asm("" : "+x"(sum)); }

inline __m256i broadcast(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

// 0 to 15: a product of two pairs is at most 2 * 15 * 127 = 3810, so the eight steps of a group fit 16 bits.
template <Form FORM, int ROWS>
inline void dots_unsigned(const uint8_t* weights, const Activations& x, size_t at, size_t stride, Lanes (&result)[ROWS]) {
    __m256i low[ROWS], high[ROWS];
    auto step = [&](int t, __m256i w0, __m256i w1) {
        for (int r = 0; r < ROWS; ++r) {
            const __m256i a = broadcast(&x.q[(at + r * stride) * GROUP + t * 4]);
            const __m256i p0 = _mm256_maddubs_epi16(w0, a), p1 = _mm256_maddubs_epi16(w1, a);
            low[r] = t == 0 ? p0 : _mm256_add_epi16(low[r], p0);
            high[r] = t == 0 ? p1 : _mm256_add_epi16(high[r], p1);
            keep(low[r]);
            keep(high[r]);
        }
    };
    if constexpr (FORM == HALVES) {
        const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 4
        for (int t = 0; t < STEPS / 2; ++t) {
            const __m256i b0 = bytes(weights + t * 64), b1 = bytes(weights + t * 64 + 32);
            step(t, _mm256_and_si256(b0, mask), _mm256_and_si256(b1, mask));
            step(t + STEPS / 2, _mm256_and_si256(_mm256_srli_epi16(b0, 4), mask),
                 _mm256_and_si256(_mm256_srli_epi16(b1, 4), mask));
        }
    } else {
#pragma GCC unroll 8
        for (int t = 0; t < STEPS; ++t) step(t, bytes(weights + t * 64), bytes(weights + t * 64 + 32));
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < ROWS; ++r)
        result[r] = {_mm256_cvtepi32_ps(_mm256_madd_epi16(low[r], ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(high[r], ones))};
}

// 8 bits: inputs 0 and 2 of each four are widened together, then 1 and 3, which is why activations lie in that order.
template <int ROWS>
inline void dots_signed(const uint8_t* weights, const Activations& x, size_t at, size_t stride, Lanes (&result)[ROWS]) {
    __m256i low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; ++r) low[r] = high[r] = _mm256_setzero_si256();
    auto step = [&](int pair, __m256i w0, __m256i w1) {
        for (int r = 0; r < ROWS; ++r) {
            const __m256i a = broadcast(&x.q16[(at + r * stride) * GROUP + pair * 2]);
            low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(w0, a));
            high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(w1, a));
            keep(low[r]);
            keep(high[r]);
        }
    };
#pragma GCC unroll 8
    for (int t = 0; t < STEPS; ++t) {
        const __m256i b0 = bytes(weights + t * 64), b1 = bytes(weights + t * 64 + 32);
        step(2 * t, _mm256_srai_epi16(_mm256_slli_epi16(b0, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(b1, 8), 8));
        step(2 * t + 1, _mm256_srai_epi16(b0, 8), _mm256_srai_epi16(b1, 8));
    }
    for (int r = 0; r < ROWS; ++r) result[r] = {_mm256_cvtepi32_ps(low[r]), _mm256_cvtepi32_ps(high[r])};
}

template <Form FORM, int ROWS>
inline void dots(const uint8_t* weights, const Activations& x, size_t at, size_t stride, Lanes (&result)[ROWS]) {
    if constexpr (FORM == SIGNED)
        dots_signed(weights, x, at, stride, result);
    else
        dots_unsigned<FORM>(weights, x, at, stride, result);
}

#else

template <Form FORM, int ROWS>
inline void dots(const uint8_t* weights, const Activations& x, size_t at, size_t stride, Lanes (&result)[ROWS]) {
    int32_t sums[ROWS][LANES] = {};
    for (int t = 0; t < STEPS; ++t) {
        int8_t w[LANES * 4];
        const uint8_t* line = weights + (FORM == HALVES ? t % 4 : t) * LANES * 4;
        for (int i = 0; i < LANES * 4; ++i) w[i] = int8_t(FORM == HALVES ? (t < 4 ? line[i] & 15 : line[i] >> 4) : line[i]);
        for (int r = 0; r < ROWS; ++r) {
            const int8_t* a = &x.q[(at + r * stride) * GROUP + t * 4];
            for (int lane = 0; lane < LANES; ++lane)
                for (int i = 0; i < 4; ++i) sums[r][lane] += int32_t(w[lane * 4 + i]) * a[i];
        }
    }
    for (int r = 0; r < ROWS; ++r) result[r] = each([&](int lane) { return float(sums[r][lane]); });
}

#endif

// ---- a block of outputs ----------------------------------------------------------------------------------------------

struct Output {
    float* y;            // [row][output]
    int64_t stride;      // floats from one row to the next
    const float* bias;   // [output], or null
    int64_t outputs;
};

// A block's weights: scales and minima where they are stored; q there too, or spread to bytes.
struct Block {
    const uint8_t* scales;
    const uint8_t* q;
    size_t scales_stride, q_stride;  // bytes from one group to the next
    bool half;                       // whether scales are float16, not float32
};

inline Lanes load_scales(const uint8_t* p, bool half, int first) {
    return half ? load(reinterpret_cast<const uint16_t*>(p) + first) : load(reinterpret_cast<const float*>(p) + first);
}

template <Form FORM, int ROWS>
void tile(const Block& block, const Activations& x, int64_t row, const Output& out, int64_t first) {
    Lanes sums[ROWS], products[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = zeros();
    const size_t stride = x.groups;
    for (int group = 0; group < x.groups; ++group) {
        const size_t at = size_t(row) * stride + group;
        const uint8_t* scales = block.scales + group * block.scales_stride;
        dots<FORM, ROWS>(block.q + group * block.q_stride, x, at, stride, products);
        const Lanes scale = load_scales(scales, block.half, 0);
        for (int r = 0; r < ROWS; ++r) sums[r] = fma(scaled(products[r], x.scale[at + r * stride]), scale, sums[r]);
        if (FORM != SIGNED) {
            const Lanes minimum = load_scales(scales, block.half, LANES);
            for (int r = 0; r < ROWS; ++r) sums[r] = fma(minimum, x.total[at + r * stride], sums[r]);
        }
    }
    const int64_t count = std::min<int64_t>(LANES, out.outputs - first);
    for (int r = 0; r < ROWS; ++r) {
        float* y = out.y + (row + r) * out.stride + first;
        if (count == LANES) {
            store(y, out.bias ? plus(sums[r], load(out.bias + first)) : sums[r]);
        } else {
            float values[LANES];
            store(values, sums[r]);
            for (int64_t i = 0; i < count; ++i) y[i] = values[i] + (out.bias ? out.bias[first + i] : 0.0f);
        }
    }
}

template <Form FORM, int ROWS = TILE>
void tile_of(int64_t rows, const Block& block, const Activations& x, int64_t row, const Output& out, int64_t first) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<FORM, ROWS>(block, x, row, out, first);
        else
            tile_of<FORM, ROWS - 1>(rows, block, x, row, out, first);
    }
}

// All rows with one block, in tiles of nearly the same size.
template <Form FORM>
void tiles(const Block& block, const Activations& x, int64_t rows, const Output& out, int64_t first) {
    const int64_t count = (rows + TILE - 1) / TILE;
    for (int64_t t = 0, row = 0; t < count; ++t) {
        const int64_t size = (rows - row + count - t - 1) / (count - t);
        tile_of<FORM>(size, block, x, row, out, first);
        row += size;
    }
}

// The halves of a block's groups, each to a byte of its own.
const uint8_t* spread(const uint8_t* q, size_t stride, int groups) {
    static thread_local std::vector<uint8_t> kept;
    if (kept.size() < size_t(groups) * form_bytes(BYTES)) kept.resize(size_t(groups) * form_bytes(BYTES));
    uint8_t* to = kept.data();
    for (int group = 0; group < groups; ++group, q += stride, to += form_bytes(BYTES))
        for (int i = 0; i < form_bytes(HALVES); ++i) {
            to[i] = q[i] & 15;
            to[i + form_bytes(HALVES)] = q[i] >> 4;
        }
    return kept.data();
}

// How the packed weights lie.
struct Format {
    int bits;
    bool half;
    size_t scales_bytes() const { return LANES * (half ? 2 : 4) * (bits == 4 ? 2 : 1); }
    size_t group_bytes() const { return scales_bytes() + LANES * GROUP * bits / 8; }
};

void multiply(const Activations& x, int64_t rows, const uint8_t* packed, Format format, const Output& out, int64_t index) {
    const size_t stride = format.group_bytes();
    const uint8_t* first = packed + size_t(index) * x.groups * stride;
    const Block stored{first, first + format.scales_bytes(), stride, stride, format.half};
    if (format.bits == 8) {
        tiles<SIGNED>(stored, x, rows, out, index * LANES);
    } else if (rows <= FEW) {
        tiles<HALVES>(stored, x, rows, out, index * LANES);
    } else {
        const uint8_t* q = spread(stored.q, stride, x.groups);
        tiles<BYTES>(Block{first, q, stride, form_bytes(BYTES), format.half}, x, rows, out, index * LANES);
    }
}

template <class Scale>
void pack_block(int bits, const uint8_t* q, const Scale* scale, const Scale* minimum, int64_t outputs, int64_t groups,
                int64_t block, uint8_t* to) {
    for (int64_t group = 0; group < groups; ++group) {
        auto* scales = reinterpret_cast<Scale*>(to);
        to += LANES * sizeof(Scale) * (bits == 4 ? 2 : 1);
        std::memset(scales, 0, to - reinterpret_cast<uint8_t*>(scales));
        std::memset(to, 0, LANES * GROUP * bits / 8);
        for (int lane = 0; lane < LANES && block * LANES + lane < outputs; ++lane) {
            const int64_t at = (block * LANES + lane) * groups + group;
            scales[lane] = scale[at];
            if (bits == 4) scales[LANES + lane] = minimum[at];
            for (int i = 0; i < GROUP; ++i) {
                const int step = i / 4;
                const uint8_t value = q[at * GROUP + i];
                if (bits == 4)
                    to[(step % 4) * LANES * 4 + lane * 4 + i % 4] |= step < 4 ? value : uint8_t(value << 4);
                else
                    to[step * LANES * 4 + lane * 4 + i % 4] = value;
            }
        }
        to += LANES * GROUP * bits / 8;
    }
}

}  // namespace

extern "C" {

// The instructions that this library was compiled for.
const char* linear_isa() { return ISA; }

// Bytes of a packed weight.
int64_t linear_packed_bytes(int64_t outputs, int64_t groups, int bits, int half) {
    return (outputs + LANES - 1) / LANES * groups * int64_t(Format{bits, half != 0}.group_bytes());
}

// q: a byte for each weight, [output][group][32]. scale, minimum: [output][group], float16 if half, else float32.
void linear_pack(const uint8_t* q, const void* scale, const void* minimum, int64_t outputs, int64_t groups, int bits,
                 int half, uint8_t* packed, int threads) {
    const int64_t blocks = (outputs + LANES - 1) / LANES;
    const int64_t size = linear_packed_bytes(LANES, groups, bits, half);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        if (half)
            pack_block(bits, q, static_cast<const uint16_t*>(scale), static_cast<const uint16_t*>(minimum), outputs, groups,
                       block, packed + block * size);
        else
            pack_block(bits, q, static_cast<const float*>(scale), static_cast<const float*>(minimum), outputs, groups, block,
                       packed + block * size);
    }
}

// x: [rows][inputs], rows x_stride floats apart. y: [rows][outputs], rows y_stride floats apart. bias: [outputs] or null.
void linear_run(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half,
                const float* bias, float* y, int64_t y_stride, int64_t outputs, int threads) {
    static thread_local Activations kept;
    Activations& quantised = kept;
    quantised.resize(rows, int((inputs + GROUP - 1) / GROUP));
    quantised.wants_q16 = bits == 8;
    const Output out{y, y_stride, bias, outputs};
    const Format format{bits, half != 0};
    const int64_t blocks = (outputs + LANES - 1) / LANES;
    const bool few = rows <= 2;  // then waiting for each other would take longer than doing it
    if (few)
        for (int64_t row = 0; row < rows; ++row) quantise_row(x + row * x_stride, inputs, quantised, row);
#pragma omp parallel num_threads(threads)
    {
        if (!few) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; ++row) quantise_row(x + row * x_stride, inputs, quantised, row);
        }
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; ++block) multiply(quantised, rows, packed, format, out, block);
    }
}

}  // extern "C"
