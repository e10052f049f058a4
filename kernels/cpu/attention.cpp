// Attention of runs of new tokens over scattered slots: the CPU's own form of `agentrt.attention.base.Attention`, for keys and values in floats
// of 32 or 16 bits. (Those in whole numbers: attention_int.cpp.)
//
// New keys and values are written to their slots; then every new token attends to its sequence's slots up to itself. A
// sequence is read in segments of 64 tokens, counted from its beginning. A segment gives
// each row (a token, one of its heads) a largest score, a sum of weights and a weighted sum of values, in float32; a row's
// segments are folded in order. Rows that read the same segments
// (neighbours in a run, or runs that share a prefix) read them together: few where keys and values lie (`dots`, `add`), many from
// panels of floats (`panel_scores`, `panel_sums`), which is another way through the same sums in the same order.
//
// Invariant: a row's numbers depend on its own sequence alone. The order of its sums is fixed by positions; how rows are
// put together, split over threads, or joined by a shared prefix changes no bit of them.

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention_rows.h"

namespace {

using namespace agentrt;

/// Scores of rows of q with panels of keys, each [chain * LANES dimensions, PANEL], each summed as `dots` does it: first what one lane of a vector of
/// dimensions would see, then lanes in the order of `sums_of_four`. Three rows, since memory is no place for what has been summed so far: a store
/// makes every later load from the same place in another page wait.
template <int ROWS, int CHAIN>
__attribute__((noinline)) void panel_scores(const float* const* queries, const float* keys, int64_t chain, int64_t count, float* const* scores) {
    static_assert(LANES % 4 == 0);
    if (CHAIN) chain = CHAIN;
    const float* q[ROWS];
    for (int row = 0; row < ROWS; ++row) q[row] = queries[row];
    for (int64_t panel = 0; panel < count; panel += PANEL, keys += chain * LANES * PANEL) {
        Floats total[ROWS][2];
        for (int four = 0; four < LANES; four += 4) {
            Floats sums[ROWS][2];
#pragma GCC unroll 4
            for (int lane = 0; lane < 4; ++lane) {
                Floats products[ROWS][2];
                for (int row = 0; row < ROWS; ++row) products[row][0] = products[row][1] = Floats{};
                const float* key = keys + (four + lane) * PANEL;
                int64_t i = four + lane;
#pragma GCC unroll 8
                for (int64_t left = chain; left > 0; --left, i += LANES, key += LANES * PANEL) {
                    const Floats first = held(load(key)), second = held(load(key + LANES));
                    for (int row = 0; row < ROWS; ++row) {
                        const Floats value = held(all(q[row][i]));
                        products[row][0] = multiply_add(value, first, products[row][0]);
                        products[row][1] = multiply_add(value, second, products[row][1]);
                    }
                }
                for (int row = 0; row < ROWS; ++row)
                    for (int j = 0; j < 2; ++j) sums[row][j] = lane ? sums[row][j] + products[row][j] : products[row][j];
            }
            for (int row = 0; row < ROWS; ++row)
                for (int j = 0; j < 2; ++j) total[row][j] = four ? total[row][j] + sums[row][j] : sums[row][j];
        }
        for (int row = 0; row < ROWS; ++row)
            for (int j = 0; j < 2; ++j) store(scores[row] + panel + j * LANES, total[row][j]);
    }
}

/// Sums of a panel of values [keys, PANEL], weighted, a key after the other.
template <int ROWS, int VECTORS>
__attribute__((always_inline)) inline void panel_sums(const float* const* weights, const float* values, int64_t keys, Floats (&sums)[ROWS][VECTORS]) {
    const float* of[ROWS];
    for (int row = 0; row < ROWS; ++row) of[row] = weights[row];
    for (int row = 0; row < ROWS; ++row)
        for (int j = 0; j < VECTORS; ++j) sums[row][j] = Floats{};
    for (int64_t key = 0; key < keys; ++key) {
        Floats v[VECTORS];
        for (int j = 0; j < VECTORS; ++j) v[j] = held(load(values + key * PANEL + j * LANES));
        for (int row = 0; row < ROWS; ++row) {
            const Floats weight = held(all(of[row][key]));
            for (int j = 0; j < VECTORS; ++j) sums[row][j] = multiply_add(weight, v[j], sums[row][j]);
        }
    }
}

/// A thread's memory for them.
struct FloatMemory : Scratch {
    std::vector<float> tile, panels;
};

/// The arithmetic, for keys and values of type T.
template <typename T>
class FloatKernel : public Attending<FloatKernel<T>> {
    using Base = Attending<FloatKernel<T>>;
    friend Base;
    using Base::first_, Base::group_, Base::heads_, Base::kv_heads_, Base::own_, Base::padded_, Base::shape_, Base::slot_, Base::tensors_;

public:
    FloatKernel(const AttentionShape& shape, const Tensors& tensors, Plan& plan, FloatMemory& memory)
        : Base(shape, tensors, plan, memory, shape.head_dim * int64_t(sizeof(T)), shape.head_dim * int64_t(sizeof(T))), memory_(memory), whole_vectors_(padded_ == shape.head_dim) {
        Scratch::hold(memory_.tile, SEGMENT * shape.kv_heads * padded_);
        Scratch::hold(memory_.panels, SEGMENT * (padded_ + LANES));
    }

private:
    template <typename From>
    void put_key(const From* from, int64_t slot) const {
        put(from, tensors_.keys, slot);
    }

    template <typename From>
    void put_value(const From* from, int64_t slot) const {
        put(from, tensors_.values, slot);
    }

    template <typename From>
    void put(const From* from, void* store, int64_t slot) const {
        T* to = static_cast<T*>(store) + slot * slot_;
        int64_t i = 0;
        for (; i + LANES <= slot_; i += LANES) agentrt::store(to + i, load(from + i));
        for (; i < slot_; ++i) narrow(to + i, wide(from[i]));
    }

    void took_queries(int64_t) {}
    void softened(const Reading&, int64_t, int64_t, bool) {}

    static const T* heads_of(const Reading& reading, int64_t key) { return reinterpret_cast<const T*>(reading.at[key]); }

    template <Pass, class Then>
    void at_hand(const char* const* places, int64_t count, Then then) {
        if (whole_vectors_) return then(T{}, places, shape_.head_dim * int64_t(sizeof(T)));  // widened as they are used
        const char* at[SEGMENT];
        for (int64_t key = 0; key < count; ++key) {
            float* row = memory_.tile.data() + key * kv_heads_ * padded_;
            this->read_heads(reinterpret_cast<const T*>(places[key]), kv_heads_, 1.0f, row);
            at[key] = reinterpret_cast<const char*>(row);
        }
        for (int64_t key = count; key % 4; ++key) at[key] = at[count - 1];
        then(float{}, at, padded_ * int64_t(sizeof(float)));
    }

    template <typename From, int ROWS>
    void dots(const int64_t* head, const char* const* at, int64_t count, int64_t, int64_t offset, Ahead* ahead) {
        const float* queries[ROWS];
        for (int row = 0; row < ROWS; ++row) queries[row] = own_.q.data() + head[row] * padded_;
        const int64_t bytes = shape_.head_dim * int64_t(sizeof(T));
        for (int64_t key = 0; key < count; key += 4) {
            if (ahead) {
                ahead->ask_far();
                for (int64_t line = 0; line < bytes; line += 64)
                    for (int j = 0; j < 4; ++j) __builtin_prefetch(ahead->nearby[key + j] + ahead->byte + line);
            }
            const From* keys[4];
            for (int j = 0; j < 4; ++j) keys[j] = reinterpret_cast<const From*>(at[key + j] + offset);
            Floats sums[ROWS][4] = {};
            for (int64_t i = 0; i < padded_; i += LANES) {
                Floats q[ROWS];  // three rows, twelve sums and a key fill the sixteen registers
                for (int row = 0; row < ROWS; ++row) q[row] = held(load(queries[row] + i));
                for (int j = 0; j < 4; ++j) {
                    const Floats k = held(load(keys[j] + i));
                    for (int row = 0; row < ROWS; ++row) sums[row][j] = multiply_add(q[row], k, sums[row][j]);
                }
            }
            for (int row = 0; row < ROWS; ++row) sums_of_four(sums[row], own_.scores.data() + head[row] * SEGMENT + key);
        }
    }

    template <Pass PASS, typename From, int ROWS, int VECTORS>
    void add(const int64_t* head, const char* const* at, int64_t keys, int64_t offset, int64_t i, Ahead* ahead) {
        Floats sums[ROWS][VECTORS] = {};
        const float* weights[ROWS];
        for (int row = 0; row < ROWS; ++row) weights[row] = own_.scores.data() + head[row] * SEGMENT;
        const int64_t byte = ahead ? ahead->byte + i * int64_t(sizeof(T)) : 0;
        for (int64_t key = 0; key < keys; ++key) {
            if (ahead) {
                if (key % 4 == 0) ahead->ask_far();
                for (int line = 0; line < VECTORS * LANES * int(sizeof(T)); line += 64) __builtin_prefetch(ahead->nearby[key] + byte + line);
            }
            const From* from = reinterpret_cast<const From*>(at[key] + offset) + i;
            Floats weight[ROWS];
            for (int row = 0; row < ROWS; ++row) weight[row] = held(all(weights[row][key]));
            for (int j = 0; j < VECTORS; ++j) {
                const Floats v = held(load(from + j * LANES));
                for (int row = 0; row < ROWS; ++row) sums[row][j] = multiply_add(weight[row], v, sums[row][j]);
            }
        }
        for (int row = 0; row < ROWS; ++row) this->template keep<PASS>(head[row], i, sums[row]);
    }

    template <Pass PASS, int ROWS>
    void six_rows(const Six& six, int64_t kv_head, int64_t first, int64_t stop) {
        const int64_t head = kv_head * group_;
        if constexpr (PASS == SCORES) {
            three_rows<std::min(ROWS, 3)>(six.head, head, first, stop);
            if constexpr (ROWS > 3) three_rows<ROWS - 3>(six.head + 3, head, first, stop);
        } else {
            const float* weights[ROWS];
            for (int row = 0; row < ROWS; ++row) weights[row] = own_.scores.data() + (head + six.head[row]) * SEGMENT + first;
            int64_t i = 0;
            for (; i + PANEL <= padded_; i += PANEL) values_of<PASS, ROWS, 2>(six.head, weights, head, i, first, stop);
            if (i < padded_) values_of<PASS, ROWS, 1>(six.head, weights, head, i, first, stop);
        }
    }

    template <int ROWS>
    void three_rows(const int64_t* heads, int64_t head, int64_t first, int64_t stop) {
        const float* queries[ROWS];
        float* scores[ROWS];
        first = first / PANEL * PANEL;
        for (int row = 0; row < ROWS; ++row) {
            queries[row] = own_.q.data() + (head + heads[row]) * padded_;
            scores[row] = own_.scores.data() + (head + heads[row]) * SEGMENT + first;
        }
        const float* keys = memory_.panels.data() + first * padded_;
        if (padded_ == 64)
            panel_scores<ROWS, 64 / LANES>(queries, keys, 64 / LANES, stop - first, scores);
        else
            panel_scores<ROWS, 0>(queries, keys, padded_ / LANES, stop - first, scores);
    }

    template <Pass PASS, int ROWS, int VECTORS>
    __attribute__((noinline)) void values_of(const int64_t* heads, const float* const* weights, int64_t head, int64_t i, int64_t first,
                                             int64_t stop) {
        Floats sums[ROWS][VECTORS];
        panel_sums(weights, memory_.panels.data() + i * SEGMENT + first * PANEL, stop - first, sums);
        float* const out = (PASS == FOLDED ? own_.folded : own_.sums).data() + head * padded_ + i;
        const float *seen = own_.weights.data() + head, *before = own_.before.data() + head, *now = own_.now.data() + head;
        for (int row = 0; row < ROWS; ++row) {
            const int64_t at = heads[row];
            if (PASS == FOLDED && seen[at] == 0) continue;
            for (int j = 0; j < VECTORS; ++j) {
                float* to = out + at * padded_ + j * LANES;
                agentrt::store(to, PASS == FOLDED ? this->folded(to, sums[row][j], before[at], now[at]) : sums[row][j]);
            }
        }
    }

    /// Some dimensions of a head as floats; zeros beyond the last.
    Floats dimensions(const T* head, int64_t i) const {
        if (i + LANES <= shape_.head_dim) return load(head + i);
        Floats out = {};
        for (int64_t j = 0; i + j < shape_.head_dim; ++j) out[j] = wide(head[i + j]);
        return out;
    }

    /// A KV head's keys: panels of keys, in each a dimension after the other.
    __attribute__((noinline)) void lay_keys(const Reading& reading, int64_t kv_head) {
        for (int64_t key = 0; key < reading.count; key += 8) {
            const T* from[8];
            for (int64_t j = 0; j < 8; ++j) from[j] = heads_of(reading, std::min(key + j, reading.count - 1)) + kv_head * shape_.head_dim;
            float* to = memory_.panels.data() + key / PANEL * PANEL * padded_ + key % PANEL;
            for (int64_t i = 0; i < padded_; i += LANES) {
                Floats lanes[8];
                for (int j = 0; j < 8; ++j) lanes[j] = dimensions(from[j], i);
                store_columns(lanes, to + i * PANEL, PANEL);
            }
        }
    }

    /// A KV head's values: panels of dimensions, in each a key after the other.
    __attribute__((noinline)) void lay_values(const Reading& reading, int64_t kv_head) {
        for (int64_t key = 0; key < reading.count; ++key) {
            const T* from = heads_of(reading, key) + kv_head * shape_.head_dim;
            float* to = memory_.panels.data() + key * PANEL;
            for (int64_t i = 0; i < padded_; i += LANES) agentrt::store(to + i / PANEL * PANEL * SEGMENT + i % PANEL, dimensions(from, i));
        }
    }

    FloatMemory& memory_;
    const bool whole_vectors_;
};

}  // namespace

extern "C" {

/// As `agentrt_attention`, shared. plan: a Plan of these runs. coming: what the thread reads next, or null.
void agentrt_attention_shared(const AttentionShape* shape, const AttentionRuns* runs, void* plan, const void* q, const void* k, const void* v,
                              const void* cos, const void* sin, void* keys, void* values, void* out, Coming* coming) {
    const Tensors tensors{q, k, v, cos, sin, keys, values, out};
    Plan& made = *static_cast<Plan*>(plan);
    if (shape->kv_kind == 2)
        attend<FloatKernel<Float16>, FloatMemory>(*shape, *runs, tensors, made, coming);
    else if (shape->kv_kind == 1)
        attend<FloatKernel<Bfloat16>, FloatMemory>(*shape, *runs, tensors, made, coming);
    else
        attend<FloatKernel<float>, FloatMemory>(*shape, *runs, tensors, made, coming);
}

/// Writes k and v of all tokens to their slots, and attends.
///
/// q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], each dense within a token, in one type; cos and sin
/// [tokens, head_dim] in that type, by which q and k are turned first, or null; keys and values [slots, kv_heads, head_dim],
/// dense; out [tokens, heads, head_dim], dense, in q's type.
void agentrt_attention(const AttentionShape* shape, const AttentionRuns* runs, const void* q, const void* k, const void* v, const void* cos,
                       const void* sin, void* keys, void* values, void* out) {
    planned(*shape, *runs, [&](Plan& plan) { agentrt_attention_shared(shape, runs, &plan, q, k, v, cos, sin, keys, values, out, nullptr); });
}
}
