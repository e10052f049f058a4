// Attention of runs of new tokens over scattered slots whose keys and values are whole numbers: what attention.cpp is for floats.
//
// A key's head is `head_dim` numbers of 16 bits, from -4095 to 4095, and behind them a float32 by which they are multiplied; a value's has 8 bits, from
// -127 to 127. (Keys get more, since some models have a few dimensions of them that are much larger than the others, and an error of a score is an exponent's.)
// Queries get up to 16 bits and a scale of each row and head, as many as 32 bits can sum; a segment's weights get 16, each multiplied by its value's scale
// before. What remains are products of whole numbers, summed exactly:
//
//     score  = scale of q * scale of k * sum over dimensions of q * k
//     values = scale of the weights    * sum over keys       of weight * v
//
// Invariant: as in attention.cpp, a row's numbers depend on its own sequence alone, bit for bit; here since exact sums know no order, and scales are a row's own.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "attention_rows.h"
#include "pairs.h"

namespace {

using namespace agentrt;

constexpr float MOST_KEY = 4095.0f, MOST_VALUE = 127.0f, MOST_16 = 32767.0f;

/// A thread's memory for whole numbers.
struct IntMemory : Scratch {
    std::vector<int16_t> queries, parts;           // [row, head][head_dim]: q; [row, head][SEGMENT]: weights times scales of values
    std::vector<float> query_scales, part_scales;  // [row, head]
    std::vector<float> key_scales, value_scales;   // [kv_head][SEGMENT]
    std::vector<float> panels;                     // of pairs
};

class IntKernel : public Attending<IntKernel> {
    using Base = Attending<IntKernel>;
    friend Base;

public:
    IntKernel(const AttentionShape& shape, const Tensors& tensors, Plan& plan, IntMemory& memory)
        : Base(shape, tensors, plan, memory, 2 * shape.head_dim + int64_t(sizeof(float)), shape.head_dim + int64_t(sizeof(float))), memory_(memory),
          dim_(shape.head_dim), most_query_(std::min(MOST_16, std::floor(float(INT32_MAX) / (MOST_KEY * float(shape.head_dim))))) {
        Scratch::hold(memory_.queries, most_rows_ * dim_);
        Scratch::hold(memory_.parts, most_rows_ * SEGMENT);
        Scratch::hold(memory_.query_scales, most_rows_);
        Scratch::hold(memory_.part_scales, most_rows_);
        Scratch::hold(memory_.key_scales, shape.kv_heads * SEGMENT);
        Scratch::hold(memory_.value_scales, shape.kv_heads * SEGMENT);
        Scratch::hold(memory_.panels, SEGMENT * dim_ / 2);
    }

private:
    /// Numbers and what they are to be multiplied by, so that the largest magnitude is `most`. Where one is not finite, the scale is not either.
    template <typename To>
    float quantise(const float* from, float most, To* to) const {
        const int32_t bits = largest_bits(from, dim_);
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        const float factor = most / largest;
        const bool usable = bits < 0x7f800000 && factor < INFINITY;
        auto numbers = [&](int64_t i) { return usable ? rounded(load(from + i), factor) : Ints{}; };
        if constexpr (std::is_same_v<To, int16_t>) {
            for (int64_t i = 0; i < dim_; i += 2 * LANES) agentrt::store(to + i, numbers(i), numbers(i + LANES));
        } else {
            int64_t i = 0;
            for (; i + 4 * LANES <= dim_; i += 4 * LANES) agentrt::store(to + i, {numbers(i), numbers(i + LANES), numbers(i + 2 * LANES), numbers(i + 3 * LANES)});
            if (i < dim_) {  // a half, where vectors are of 16 lanes
                int8_t rest[4 * LANES];
                agentrt::store(rest, {numbers(i), numbers(i + LANES), Ints{}, Ints{}});
                std::memcpy(to + i, rest, 2 * LANES);
            }
        }
        return largest / most;
    }

    template <typename From>
    void put_key(const From* from, int64_t slot) {
        put<int16_t>(from, tensors_.keys, slot, key_bytes_, MOST_KEY);
    }

    template <typename From>
    void put_value(const From* from, int64_t slot) {
        put<int8_t>(from, tensors_.values, slot, value_bytes_, MOST_VALUE);
    }

    template <typename To, typename From>
    void put(const From* from, void* store, int64_t slot, int64_t bytes, float most) {
        float* head = own_.sums.data();
        char* to = static_cast<char*>(store) + slot * shape_.kv_heads * bytes;
        for (int64_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head, from += dim_, to += bytes) {
            for (int64_t i = 0; i < dim_; i += LANES) agentrt::store(head + i, load(from + i));
            const float scale = quantise(head, most, reinterpret_cast<To*>(to));
            std::memcpy(to + dim_ * int64_t(sizeof(To)), &scale, sizeof scale);
        }
    }

    void took_queries(int64_t row) {
        for (int64_t head = row * heads_; head < (row + 1) * heads_; ++head)
            memory_.query_scales[size_t(head)] = quantise(own_.q.data() + head * dim_, most_query_, memory_.queries.data() + head * dim_);
    }

    /// A segment's scales, which lie at that byte of each place.
    static void read_scales(const char* const* at, int64_t count, int64_t byte, float* to) {
        for (int64_t key = 0; key < count; ++key) std::memcpy(to + key, at[key] + byte, sizeof(float));
    }

    /// Weights become parts: times their value's scale, of 16 bits, with a scale of each row and head.
    void softened(const Reading& values, int64_t from, int64_t count, bool all_seen) {
        for (int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head)
            read_scales(values.at, values.count, kv_head * value_bytes_ + dim_, memory_.value_scales.data() + kv_head * SEGMENT);
        int64_t head = from * heads_;
        for (int64_t row = 0; row < count; ++row)
            for (int64_t kv_head = 0; kv_head < kv_heads_; ++kv_head) {
                const float* scales = memory_.value_scales.data() + kv_head * SEGMENT;
                for (int64_t i = 0; i < group_; ++i, ++head) all_seen ? make_parts<true>(head, scales, SEGMENT) : make_parts<false>(head, scales, values.count);
            }
    }

    template <bool ALL_SEEN>
    void make_parts(int64_t head, const float* scales, int64_t keys) {
        const float* weights = own_.scores.data() + head * SEGMENT;
        int16_t* parts = memory_.parts.data() + head * SEGMENT;
        Floats products[SEGMENT / LANES];
        Ints most = {};
#pragma GCC unroll 8
        for (int64_t i = 0; i < SEGMENT / LANES; ++i) {
            const bool here = ALL_SEEN || i * LANES < keys;
            const Floats weight = here ? load(weights + i * LANES) : Floats{};
            products[i] = weight * load(scales + i * LANES);
            if (!ALL_SEEN) products[i] = (weight > 0.0f) ? products[i] : Floats{};  // what is not seen may hold anything
            const Ints bits = (Ints)products[i];
            most = bits > most ? bits : most;
        }
        const int32_t bits = agentrt::largest(most);  // of numbers that are not negative; NaN is above all
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        const float factor = std::min(MOST_16 / largest, 3e38f);
#pragma GCC unroll 8
        for (int64_t i = 0; i < SEGMENT / LANES; i += 2)
            agentrt::store(parts + i * LANES, rounded(products[i], factor), rounded(products[i + 1], factor));
        memory_.part_scales[size_t(head)] = 1.0f / factor;
    }

    template <Pass PASS, class Then>
    void at_hand(const char* const* places, int64_t, Then then) {
        then(int8_t{}, places, PASS == SCORES ? key_bytes_ : value_bytes_);
    }

    template <typename, int ROWS>
    void dots(const int64_t* head, const char* const* at, int64_t count, int64_t kv_head, int64_t offset, Ahead* ahead) {
        const int16_t* queries[ROWS];
        for (int row = 0; row < ROWS; ++row) queries[row] = memory_.queries.data() + head[row] * dim_;
        alignas(64) int32_t found[ROWS][SEGMENT];
        const int64_t dim = dim_;
        for (int64_t key = 0; key < count; key += 4) {
            if (ahead) ahead->ask_far();
            const int16_t* keys[4];
            for (int j = 0; j < 4; ++j) keys[j] = reinterpret_cast<const int16_t*>(at[key + j] + offset);
            Ints sums[ROWS][4] = {};
            for (int64_t i = 0; i < dim; i += 2 * LANES)
                for (int j = 0; j < 4; ++j) {
                    const Ints k = pairs(keys[j] + i);
                    for (int row = 0; row < ROWS; ++row) sums[row][j] = add_products(k, pairs(queries[row] + i), sums[row][j]);
                }
            for (int row = 0; row < ROWS; ++row) sums_of_four(sums[row], found[row] + key);
        }
        float* const scales = memory_.key_scales.data() + kv_head * SEGMENT;
        if (ahead) read_scales(at, count, offset + 2 * dim, scales);  // by the first rows, who have just had all that is near them
        for (int row = 0; row < ROWS; ++row) {
            float* scores = own_.scores.data() + head[row] * SEGMENT;
            const Floats query_scale = all(memory_.query_scales[size_t(head[row])]);
            for (int64_t key = 0; key < count; key += LANES)
                agentrt::store(scores + key, score(*reinterpret_cast<const LooseInts*>(found[row] + key), scales + key, query_scale));
        }
    }

    static Floats score(Ints sums, const float* key_scales, Floats query_scale) { return floats(sums) * load(key_scales) * query_scale; }

    template <Pass PASS, typename, int ROWS, int VECTORS>
    void add(const int64_t* head, const char* const* at, int64_t keys, int64_t offset, int64_t i, Ahead* ahead) {
        Ints sums[ROWS][VECTORS] = {};
        const int16_t* parts[ROWS];
        for (int row = 0; row < ROWS; ++row) parts[row] = memory_.parts.data() + head[row] * SEGMENT;
        for (int64_t key = 0; key < keys; key += 2) {
            if (ahead && key % 4 == 0) ahead->ask_far();
            const auto *first = reinterpret_cast<const int8_t*>(at[key] + offset) + i, *second = reinterpret_cast<const int8_t*>(at[key + 1] + offset) + i;
            Ints part[ROWS];
            for (int row = 0; row < ROWS; ++row) part[row] = all_pairs(parts[row] + key);
            for (int j = 0; j < VECTORS; ++j) {
                const Ints v = pairs(first + j * LANES, second + j * LANES);
                for (int row = 0; row < ROWS; ++row) sums[row][j] = add_products(part[row], v, sums[row][j]);
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            Floats values[VECTORS];
            for (int j = 0; j < VECTORS; ++j) values[j] = floats(sums[row][j]) * all(memory_.part_scales[size_t(head[row])]);
            keep<PASS>(head[row], i, values);
        }
    }

    template <Pass PASS, int ROWS>
    void six_rows(const Six& six, int64_t kv_head, int64_t first, int64_t stop) {
        int64_t heads[ROWS];
        for (int row = 0; row < ROWS; ++row) heads[row] = kv_head * group_ + six.head[row];
        if constexpr (PASS == SCORES) {
            if (dim_ == 64)
                panel_scores<ROWS, 64>(heads, kv_head, first, stop);
            else
                panel_scores<ROWS, 0>(heads, kv_head, first, stop);
        } else {
            panel_values<PASS>(heads, first, stop);
        }
    }

    /// Rows' scores with a segment's panels of keys [head_dim / 2, PANEL], pairs of dimensions.
    template <int ROWS, int DIM>
    __attribute__((noinline)) void panel_scores(const int64_t (&heads)[ROWS], int64_t kv_head, int64_t first, int64_t stop) {
        const int64_t dim = DIM ? DIM : dim_;
        const int16_t* queries[ROWS];
        float* scores[ROWS];
        float query_scales[ROWS];
        for (int row = 0; row < ROWS; ++row) {
            queries[row] = memory_.queries.data() + heads[row] * dim;
            scores[row] = own_.scores.data() + heads[row] * SEGMENT;
            query_scales[row] = memory_.query_scales[size_t(heads[row])];
        }
        const float *const panels = memory_.panels.data(), *const scales = memory_.key_scales.data() + kv_head * SEGMENT;
        for (int64_t key = first / PANEL * PANEL; key < stop; key += PANEL) {
            const int16_t* keys = reinterpret_cast<const int16_t*>(panels + key * dim / 2);
            Ints sums[ROWS][2] = {};
#pragma GCC unroll 4
            for (int64_t i = 0; i < dim; i += 2, keys += 2 * PANEL) {
                const Ints k[2] = {pairs(keys), pairs(keys + 2 * LANES)};
                for (int row = 0; row < ROWS; ++row) {
                    const Ints q = all_pairs(queries[row] + i);
                    for (int j = 0; j < 2; ++j) sums[row][j] = add_products(q, k[j], sums[row][j]);
                }
            }
            for (int row = 0; row < ROWS; ++row)
                for (int j = 0; j < 2; ++j)
                    agentrt::store(scores[row] + key + j * LANES, score(sums[row][j], scales + key + j * LANES, all(query_scales[row])));
        }
    }

    /// Rows' sums of a segment's panels of values [SEGMENT / 2, PANEL], pairs of keys.
    template <Pass PASS, int ROWS>
    __attribute__((noinline)) void panel_values(const int64_t (&heads)[ROWS], int64_t first, int64_t stop) {
        const int64_t dim = dim_;
        const int16_t* parts[ROWS];
        float* to[ROWS];
        float scales[ROWS], before[ROWS], now[ROWS];
        first = first / 2 * 2;
        for (int row = 0; row < ROWS; ++row) {
            const int64_t head = heads[row];
            const bool none = PASS == FOLDED && own_.weights[size_t(head)] == 0;  // seen, so what there is stays as it is
            parts[row] = memory_.parts.data() + head * SEGMENT;
            to[row] = (PASS == FOLDED && !none ? own_.folded : own_.sums).data() + head * dim;
            scales[row] = memory_.part_scales[size_t(head)], before[row] = own_.before[size_t(head)], now[row] = own_.now[size_t(head)];
        }
        const float* const panels = memory_.panels.data() + first / 2 * PANEL;
        for (int64_t i = 0; i < dim; i += PANEL) {
            const int16_t* values = reinterpret_cast<const int16_t*>(panels + i * (SEGMENT / 2));
            Ints sums[ROWS][2] = {};
#pragma GCC unroll 2
            for (int64_t key = first; key < stop; key += 2, values += 2 * PANEL) {
                const Ints v[2] = {pairs(values), pairs(values + 2 * LANES)};
                for (int row = 0; row < ROWS; ++row) {
                    const Ints part = all_pairs(parts[row] + key);
                    for (int j = 0; j < 2; ++j) sums[row][j] = add_products(part, v[j], sums[row][j]);
                }
            }
            for (int row = 0; row < ROWS; ++row)
                for (int j = 0; j < 2; ++j) {
                    const Floats found = floats(sums[row][j]) * all(scales[row]);
                    float* const at = to[row] + i + j * LANES;
                    agentrt::store(at, PASS == FOLDED ? folded(at, found, before[row], now[row]) : found);
                }
        }
    }

    /// A KV head's keys: panels of keys, in each a pair of dimensions after the other.
    __attribute__((noinline)) void lay_keys(const Reading& reading, int64_t kv_head) {
        read_scales(reading.at, reading.count, kv_head * key_bytes_ + 2 * dim_, memory_.key_scales.data() + kv_head * SEGMENT);
        for (int64_t key = 0; key < reading.count; key += 8) {
            const int16_t* from[8];
            for (int64_t j = 0; j < 8; ++j) from[j] = reinterpret_cast<const int16_t*>(reading.at[std::min(key + j, reading.count - 1)] + kv_head * key_bytes_);
            float* to = memory_.panels.data() + key / PANEL * PANEL * (dim_ / 2) + key % PANEL;
            for (int64_t i = 0; i < dim_; i += 2 * LANES) {
                Floats lanes[8];
                for (int j = 0; j < 8; ++j) lanes[j] = (Floats)pairs(from[j] + i);
                store_columns(lanes, to + i / 2 * PANEL, PANEL);
            }
        }
    }

    /// A KV head's values: panels of dimensions, in each a pair of keys after the other.
    __attribute__((noinline)) void lay_values(const Reading& reading, int64_t kv_head) {
        for (int64_t key = 0; key < reading.count; key += 2) {
            const char *const one = reading.at[key] + kv_head * value_bytes_, *const other = reading.at[std::min(key + 1, reading.count - 1)] + kv_head * value_bytes_;
            const auto *first = reinterpret_cast<const int8_t*>(one), *second = reinterpret_cast<const int8_t*>(other);
            float* to = memory_.panels.data() + key / 2 * PANEL;
            for (int64_t i = 0; i < dim_; i += LANES)
                agentrt::store(to + i / PANEL * PANEL * (SEGMENT / 2) + i % PANEL, (Floats)pairs(first + i, second + i));
        }
    }

    IntMemory& memory_;
    const int64_t dim_;
    const float most_query_;
};

}  // namespace

extern "C" {

/// As `agentrt_attention_int`, shared. plan: a Plan of these runs. coming: what the thread reads next, or null.
void agentrt_attention_int_shared(const AttentionShape* shape, const AttentionRuns* runs, void* plan, const void* q, const void* k, const void* v,
                                  const void* cos, const void* sin, void* keys, void* values, void* out, Coming* coming) {
    attend<IntKernel, IntMemory>(*shape, *runs, Tensors{q, k, v, cos, sin, keys, values, out}, *static_cast<Plan*>(plan), coming);
}

/// As `agentrt_attention`; keys are bytes [slots, kv_heads, 2 * head_dim + 4], values [slots, kv_heads, head_dim + 4], dense. head_dim: a multiple of 32, at
/// most 256.
void agentrt_attention_int(const AttentionShape* shape, const AttentionRuns* runs, const void* q, const void* k, const void* v, const void* cos,
                           const void* sin, void* keys, void* values, void* out) {
    planned(*shape, *runs, [&](Plan& plan) { agentrt_attention_int_shared(shape, runs, &plan, q, k, v, cos, sin, keys, values, out, nullptr); });
}
}
