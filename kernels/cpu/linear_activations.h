// Rows of activations put into 8 bits, in the order in which the dot products of `linear_dots.h` read them: each group of a row has a scale of its own.
// What a row becomes depends on nothing but the row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "linear_lanes.h"

namespace agentrt {
namespace {

// Bytes of a row's group.
#if defined(ISA_AVX2)
constexpr int q_bytes_of(int bits) { return bits == 5 || bits == 6 ? GROUP : 2 * GROUP; }  // else each pair of bytes twice (4 bits), or bytes in 16 bits (8)
#else
constexpr int q_bytes_of(int) { return GROUP; }
#endif

// The middle one of a weight's values, if it is stored without a sign; sums are of weights less that.
constexpr int middle_of(int bits) { return bits == 8 ? 0 : 1 << (bits - 1); }

// Rows quantised to 8 bits for weights of so many bits. Memory of the calling thread, kept for its next call.
struct Activations {
    int bits = 0, groups = 0;
    std::vector<int8_t> q;       // [row][group], q_bytes_of(bits) each
    std::vector<int32_t> start;  // [row][group][halves_of(bits)]: what a sum in a lane begins with
    std::vector<float> scale;    // [row][group]
    std::vector<float> total;    // [row][group]: scale * sum of q

    void resize(int64_t rows, int group_count, int weight_bits) {
        bits = weight_bits;
        groups = group_count;
        const size_t count = size_t(rows) * groups, bytes = count * q_bytes_of(bits), starts = count * halves_of(bits);
        if (q.size() < bytes) q.resize(bytes);
        if (start.size() < starts) start.resize(starts);
        if (scale.size() < count) {
            scale.resize(count);
            total.resize(count);
        }
    }
};

// What a lane's sum begins with. A pair of 16 bits each: the sum of the first two of each four q, and of the others.
inline int32_t start_of(int bits, int32_t pair) {
    const int32_t first = int16_t(pair), second = int16_t(uint32_t(pair) >> 16), sum = first + second;
#if defined(ISA_AVX2)  // two lanes of 16 bits, which hold every final sum and may overflow on the way there
    auto lanes = [=](int32_t a, int32_t b) { return int32_t(uint32_t(uint16_t(-middle_of(bits) * a)) | uint32_t(uint16_t(-middle_of(bits) * b)) << 16); };
    return bits == 4 ? lanes(sum, sum) : lanes(first, second);
#elif defined(ISA_VNNI)  // the instruction wants one side unsigned, so 8-bit weights get 128 added
    return sum * -(bits == 8 ? 128 : middle_of(bits));
#else
    return sum * -middle_of(bits);
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
        return;
    }
    if (bits == 8) {
        write(to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(q)));
        write(to + 32, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(q, 1)));
        return;
    }
#endif
    (void)bits;
    write(to, q);
}

// TURN groups at most, whole ones.
void quantise_groups(const float* x, int count, Activations& to, size_t at) {
    alignas(32) float inverse[TURN], scale[TURN];
    alignas(32) int32_t finite[TURN], sum[TURN], pair[2][TURN];
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
        write_q(q, to.bits, &to.q[(at + group) * q_bytes_of(to.bits)]);
        lanes[group] = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
    }
    auto add = [](__m256i a, __m256i b) { return _mm256_add_epi16(a, b); };
    auto put = [](int32_t* p, __m256i v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); };
    const __m256i pairs = across(lanes, add);
    put(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    put(pair[0], pairs);
    const int halves = halves_of(to.bits);
    if (halves == 2) {
        for (__m256i& q : lanes) q = _mm256_inserti128_si256(q, _mm_setzero_si128(), 1);
        const __m256i firsts = across(lanes, add);
        put(pair[0], firsts);
        put(pair[1], _mm256_sub_epi16(pairs, firsts));
    }
    for (int group = 0; group < count; ++group) {
        to.scale[at + group] = scale[group];
        for (int half = 0; half < halves; ++half) to.start[(at + group) * halves + half] = start_of(to.bits, pair[half][group]);
        to.total[at + group] = scale[group] * float(sum[group]);
    }
}

#else

constexpr int TURN = 1;

void quantise_groups(const float* x, int, Activations& to, size_t at) {
    int32_t bits[GROUP], most = 0, sum = 0;
    int16_t pair[2][2] = {};
    const int halves = halves_of(to.bits);
    std::memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; ++i) most = std::max(most, bits[i] & 0x7fffffff);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const bool finite = most < 0x7f800000;
    const float inverse = finite && 127.0f / largest <= std::numeric_limits<float>::max() ? 127.0f / largest : 0.0f;
    for (int i = 0; i < GROUP; ++i) {
        const int32_t value = inverse > 0 ? int32_t(std::nearbyint(x[i] * inverse)) : 0;
        to.q[at * q_bytes_of(to.bits) + i] = int8_t(value);
        sum += value;
        pair[i / (GROUP / halves)][i % 4 / 2] += int16_t(value);
    }
    to.scale[at] = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    for (int half = 0; half < halves; ++half) {
        int32_t both;
        std::memcpy(&both, pair[half], sizeof both);
        to.start[at * halves + half] = start_of(to.bits, both);
    }
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

}  // namespace
}  // namespace agentrt
