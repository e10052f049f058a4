// Attention of runs of new tokens over scattered slots: the CPU's own form of `agentrt.attention.base.Attention`.
//
// New keys and values are written to their slots; then every new token attends to its sequence's slots up to itself. A
// sequence is read in segments of 64 tokens, counted from its beginning. A segment gives
// each row (a token, one of its heads) a largest score, a sum of weights and a weighted sum of values, in float32; a row's
// segments are folded in order (log-sum-exp, after Dao et al., FlashAttention, 2022). Rows that read the same segments
// (neighbours in a run, or runs that share a prefix) read them together: few where keys and values lie (`pass`), many from
// panels of floats (`pass_of_many`), which is another way through the same sums in the same order.
//
// Invariant: a row's numbers depend on its own sequence alone. The order of its sums is fixed by positions; how rows are
// put together, split over threads, or joined by a shared prefix changes no bit of them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace {

using namespace agentrt;

constexpr int SEGMENT = 64;       // tokens that are read together
constexpr int WIDE = 4 * LANES;   // dimensions of values that few rows add at once
constexpr int PANEL = 2 * LANES;  // keys, or dimensions of values, that many rows go through before the next
constexpr int SIX = 6;            // rows that do so at once: their sums with a panel of values fill the registers
constexpr int MANY = 6 * SIX;     // rows from which on panels pay: tokens times the query heads of a KV head
constexpr int LONG = 16;          // tokens of a run from which on its KV heads are worked through apart
constexpr int TOGETHER = 32;      // tokens that may read a segment together, all heads of them
constexpr int APART = 64;         // the same, one KV head of them
constexpr int64_t TILE = 24576;   // floats of q that such tokens may have: as much again for their sums, and all fits the cache
constexpr int64_t SMALL = 60000;  // multiplications below which a second thread costs more than it saves

}  // namespace

extern "C" {

/// What a layer asks, and how its tensors lie. Strides are in elements, from token to token.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    int64_t q_stride, k_stride, v_stride;
    int64_t q_bfloat16;               // else float32
    int64_t kv_kind;                  // 0: float32, 1: bfloat16, 2: float16
    int64_t window;                   // 0: all
    int64_t threads;
    double scale, softcap;  // softcap 0: none
};

/// The runs of a step, as in `agentrt.attention.base.AttentionBatch`; tokens of a run that do not attend count as its context.
struct AttentionRuns {
    int64_t count, tokens;         // all tokens, whose keys and values are written
    const int64_t* first_row;      // [count]: the run's first row of q that attends
    const int64_t* query_lengths;  // [count]: how many do; may be 0
    const int64_t* context_lengths;
    const int64_t* const* slots;
    const int64_t* new_slots;  // [tokens]
    int64_t groups;            // of runs that share a prefix
    const int64_t* group_sizes;
    const int64_t* group_members;  // group after group
    const int64_t* group_lengths;
};
}

namespace {

struct Tensors {
    const void *q, *k, *v, *cos, *sin;
    void *keys, *values, *out;
};

/// A head turned by its position's angles (the halves against each other; the first half of the sines is negated), as floats.
template <typename From>
void rotate(const From* head, const From* cos, const From* sin, int64_t dim, float scale, float* to) {
    const int64_t half = dim / 2;
    for (int64_t part = 0; part < dim; part += half) {
        const From* other = head + (part ? 0 : half);
        int64_t i = 0;
        for (; i + LANES <= half; i += LANES)
            store(to + part + i, (load(head + part + i) * load(cos + part + i) + load(other + i) * load(sin + part + i)) * scale);
        for (; i < half; ++i) to[part + i] = (wide(head[part + i]) * wide(cos[part + i]) + wide(other[i]) * wide(sin[part + i])) * scale;
    }
}

/// A token that attends: its row of q, its sequence, and the positions [first, stop) that it sees.
struct Row {
    int64_t row, first, stop;
    const int64_t* slots;
};

/// Rows that read segments [first, common) together, and each the rest of its own alone.
struct Block {
    int64_t begin, count;  // of the plan's rows
    int64_t first, common, last;
    bool apart = false;    // a task for each KV head
    int64_t partial = -1;  // where its segments' results lie, if several tasks share the block
};

/// Segments [first, last) of a block; `row` is -1 for those that all rows read, else whose. `kv_head` is -1 for all of them.
struct Task {
    int64_t block, row, first, last, kv_head = -1;
};

struct Plan {
    std::vector<Row> rows;
    std::vector<Block> blocks;
    std::vector<Task> tasks;
    std::vector<int64_t> split;  // blocks that several tasks share
    std::vector<float> partial;
    int64_t multiplications = 0;
};

/// A head's floats, filled up to whole vectors.
int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

int64_t segments(int64_t positions) { return (positions + SEGMENT - 1) / SEGMENT; }

class Planner {
public:
    Planner(const AttentionShape& shape, const AttentionRuns& runs, Plan& plan)
        : shape_(shape), runs_(runs), plan_(plan), width_(shape.heads * padded(shape.head_dim)) {
        most_ = std::clamp<int64_t>(TILE / width_, 1, TOGETHER);
    }

    void make() {
        plan_.rows.clear();
        plan_.blocks.clear();
        plan_.tasks.clear();
        plan_.split.clear();
        plan_.multiplications = 0;
        grouped_.assign(size_t(runs_.count), false);
        if (!shape_.window) share();
        for (int64_t run = 0; run < runs_.count; ++run)
            if (!grouped_[size_t(run)] && runs_.query_lengths[run]) alone(run);
        divide();
    }

private:
    void add(int64_t run, int64_t from, int64_t count) {
        for (int64_t token = from; token < from + count; ++token) {
            const int64_t position = runs_.context_lengths[run] + token;
            const int64_t first = shape_.window ? std::max<int64_t>(0, position - shape_.window + 1) : 0;
            plan_.rows.push_back({runs_.first_row[run] + token, first, position + 1, runs_.slots[run]});
            plan_.multiplications += 2 * width_ * (position + 1 - first);
        }
    }

    /// Runs with a common prefix: blocks whose rows read it together.
    void share() {
        const int64_t* members = runs_.group_members;
        for (int64_t group = 0; group < runs_.groups; members += runs_.group_sizes[group], ++group) {
            const int64_t common = runs_.group_lengths[group] / SEGMENT;
            if (!common) continue;
            int64_t rows = 0;
            for (int64_t i = 0; i < runs_.group_sizes[group]; ++i) {
                const int64_t length = runs_.query_lengths[members[i]];
                rows += length <= most_ ? length : 0;
            }
            // Fewer rows a block if threads would have nothing to do.
            const int64_t most = std::clamp<int64_t>((rows + shape_.threads - 1) / shape_.threads, 1, most_);
            Block block{int64_t(plan_.rows.size()), 0, 0, common, common, false};
            for (int64_t i = 0; i < runs_.group_sizes[group]; ++i) {
                const int64_t run = members[i], length = runs_.query_lengths[run];
                if (length > most_) continue;  // read in blocks of their own, which is sharing enough
                grouped_[size_t(run)] = true;
                if (!length) continue;
                if (block.count && block.count + length > most) {
                    plan_.blocks.push_back(block);
                    block = {int64_t(plan_.rows.size()), 0, 0, common, common, false};
                }
                add(run, 0, length);
                block.count += length;
            }
            if (block.count) plan_.blocks.push_back(block);
        }
    }

    void alone(int64_t run) {
        const int64_t length = runs_.query_lengths[run];
        const bool apart = length >= LONG;
        int64_t most = most_;
        if (apart) {  // enough tasks for the threads, if that leaves blocks that are worth it; all of about one size
            most = std::clamp<int64_t>(TILE * shape_.kv_heads / width_, 1, APART);
            most = std::min(most, std::max<int64_t>(length * shape_.kv_heads / (4 * shape_.threads), LONG));
            const int64_t blocks = (length + most - 1) / most;
            most = (length + blocks - 1) / blocks;
        }
        for (int64_t token = (length - 1) / most * most; token >= 0; token -= most) {  // the last see most: first
            const int64_t count = std::min(most, length - token), begin = int64_t(plan_.rows.size());
            add(run, token, count);
            const int64_t last = segments(plan_.rows.back().stop);
            plan_.blocks.push_back({begin, count, plan_.rows[size_t(begin)].first / SEGMENT, last, last, apart});
        }
    }

    /// Blocks become tasks; with too few of them for the threads, each is split.
    void divide() {
        int64_t pieces = 0, room = 0, tasks = 0;
        for (Block& block : plan_.blocks) {
            for (int64_t i = block.begin; i < block.begin + block.count; ++i)
                block.last = std::max(block.last, segments(plan_.rows[size_t(i)].stop));
            pieces += block.last - block.first;
            tasks += block.apart ? shape_.kv_heads : 1;
        }
        const bool few = shape_.threads > 1 && plan_.multiplications > SMALL && tasks < 4 * shape_.threads;
        const int64_t piece = std::max<int64_t>(1, pieces / (4 * shape_.threads));
        for (int64_t at = 0; at < int64_t(plan_.blocks.size()); ++at) {
            Block& block = plan_.blocks[size_t(at)];
            const int64_t count = block.last - block.first;
            if (block.apart) {
                for (int64_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) plan_.tasks.push_back({at, -1, block.first, block.last, kv_head});
            } else if (!few || count <= piece || block.count * count > 8192) {
                plan_.tasks.push_back({at, -1, block.first, block.last});
            } else {
                block.partial = room;
                room += block.count * count * (width_ + 2 * shape_.heads);
                plan_.split.push_back(at);
                cut(at, -1, block.first, block.common, piece);
                for (int64_t row = 0; row < block.count; ++row)
                    cut(at, row, block.common, segments(plan_.rows[size_t(block.begin + row)].stop), piece);
            }
        }
        if (int64_t(plan_.partial.size()) < room) plan_.partial.resize(size_t(room));
    }

    void cut(int64_t block, int64_t row, int64_t first, int64_t last, int64_t piece) {
        for (; first < last; first += piece) plan_.tasks.push_back({block, row, first, std::min(first + piece, last)});
    }

    const AttentionShape& shape_;
    const AttentionRuns& runs_;
    Plan& plan_;
    int64_t width_, most_;
    std::vector<bool> grouped_;
};

/// What is asked for while few rows read a KV head of a segment. Nearby: what they read next, the same place of each slot, from the second cache into
/// the first. Far: the slots of the pass after this one, whole, from memory; little by little, since a core waits for few lines at once.
struct Ahead {
    const char* const* nearby;
    int64_t byte;  // of a slot of `nearby`
    const char* const* far;
    int64_t slots, bytes, step, asked;  // the last two in 2^20ths of a slot

    /// Inlined, since a compiler sees no effect in a call of this and leaves it out.
    __attribute__((always_inline)) void ask_far() {
        const int64_t first = asked >> 20, stop = std::min((asked += step) >> 20, slots);
        for (int64_t i = first; i < stop; ++i)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(far[i] + at, 0, 2);
    }
};

/// Rows that go through a panel together: heads of tokens [first, last], by their place among the heads of a block; for the first KV head.
struct Six {
    int64_t count, first, last;
    int64_t head[SIX];
};

/// A thread's memory; kept, since fresh memory costs page faults.
struct Scratch {
    std::vector<float> q, sums, folded, scores, tile, panels, peaks, weights, folded_peaks, folded_weights, before, now;
    std::vector<Six> sixes;

    template <typename Item>
    static void hold(std::vector<Item>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size_t(size));
    }
};

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

/// The arithmetic, for keys and values of type T.
template <typename T>
class Kernel {
public:
    Kernel(const AttentionShape& shape, const Tensors& tensors, Plan& plan, Scratch& scratch)
        : shape_(shape), tensors_(tensors), plan_(plan), own_(scratch), padded_(padded(shape.head_dim)), group_(shape.heads / shape.kv_heads),
          slot_(shape.kv_heads * shape.head_dim), whole_vectors_(padded_ == shape.head_dim) {
        const int64_t rows = std::max(TOGETHER * shape.heads, APART * group_);
        Scratch::hold(own_.q, std::max(rows * padded_, slot_));
        Scratch::hold(own_.sums, rows * padded_);
        Scratch::hold(own_.folded, rows * padded_);
        Scratch::hold(own_.scores, rows * SEGMENT);
        Scratch::hold(own_.tile, SEGMENT * shape.kv_heads * padded_);
        Scratch::hold(own_.panels, SEGMENT * (padded_ + LANES));
        Scratch::hold(own_.sixes, (std::max(TOGETHER, APART) * group_ + SIX - 1) / SIX);
        for (auto* memory : {&own_.peaks, &own_.weights, &own_.folded_peaks, &own_.folded_weights, &own_.before, &own_.now})
            Scratch::hold(*memory, rows + LANES);
        take(-1);
    }

    /// Writes a new token's key, turned by its angles, and its value.
    void write_token(const AttentionRuns& runs, int64_t token) {
        if (shape_.q_bfloat16)
            write_token<Bfloat16>(runs, token);
        else
            write_token<float>(runs, token);
    }

    void run(const Task& task) {
        const Block& block = plan_.blocks[size_t(task.block)];
        const Row* rows = plan_.rows.data() + block.begin;
        take(task.kv_head);
        if (block.partial >= 0) {
            const bool common = task.row < 0;
            part(block, rows, common ? 0 : task.row, common ? block.count : 1, task.first, task.last);
        } else {
            whole(block, rows);
        }
    }

    /// Folds what the tasks of a split block left.
    void merge(const Block& block) {
        const Row* rows = plan_.rows.data() + block.begin;
        take(-1);
        for (int64_t row = 0; row < block.count; ++row) {
            begin_fold(row, 1);
            for (int64_t segment = block.first; segment < segments(rows[row].stop); ++segment) {
                const float* result = partial(block, row, segment);
                weigh(row, 1, result, result + shape_.heads);
                for (int64_t head = 0; head < shape_.heads; ++head)
                    if (result[shape_.heads + head] != 0) fold(row * shape_.heads + head, result + 2 * shape_.heads + head * padded_);
            }
            finish(rows[row], row);
        }
    }

private:
    /// What follows is about this KV head and those that read it; -1: about all.
    void take(int64_t kv_head) {
        kv_heads_ = kv_head < 0 ? shape_.kv_heads : 1;
        heads_ = kv_heads_ * group_;
        first_ = std::max<int64_t>(kv_head, 0);
        arranged_count_ = 0;
    }

    template <typename From>
    void write_token(const AttentionRuns& runs, int64_t token) {
        const From *k = static_cast<const From*>(tensors_.k) + token * shape_.k_stride, *v = static_cast<const From*>(tensors_.v) + token * shape_.v_stride;
        T *key = static_cast<T*>(tensors_.keys) + runs.new_slots[token] * slot_, *value = static_cast<T*>(tensors_.values) + runs.new_slots[token] * slot_;
        if (tensors_.cos) {
            const int64_t dim = shape_.head_dim;
            const From *cos = static_cast<const From*>(tensors_.cos) + token * dim, *sin = static_cast<const From*>(tensors_.sin) + token * dim;
            for (int64_t at = 0; at < slot_; at += dim) rotate(k + at, cos, sin, dim, 1.0f, own_.q.data() + at);
            put(own_.q.data(), key);
        } else {
            put(k, key);
        }
        put(v, value);
    }

    template <typename From>
    void put(const From* from, T* to) const {
        int64_t i = 0;
        for (; i + LANES <= slot_; i += LANES) store(to + i, load(from + i));
        for (; i < slot_; ++i) narrow(to + i, wide(from[i]));
    }

    /// A block by one task: the common segments, then each row's own; rows of one run stay together.
    void whole(const Block& block, const Row* rows) {
        begin_fold(0, block.count);
        read_queries(rows, 0, block.count);
        for (int64_t segment = block.first; segment < block.common; ++segment) attend<true>(rows, 0, block.count, segment, segment + 1 < block.common);
        for (int64_t row = 0, count; row < block.count; row += count) {
            for (count = 1; row + count < block.count && rows[row + count].slots == rows[row].slots;) ++count;
            const int64_t last = segments(rows[row + count - 1].stop);
            for (int64_t segment = block.common; segment < last; ++segment) attend<true>(rows, row, count, segment, segment + 1 < last);
        }
        for (int64_t row = 0; row < block.count; ++row) finish(rows[row], row);
    }

    void part(const Block& block, const Row* rows, int64_t row, int64_t count, int64_t first, int64_t last) {
        read_queries(rows, row, count);
        for (int64_t segment = first; segment < last; ++segment) {
            attend<false>(rows, row, count, segment, segment + 1 < last);
            for (int64_t i = row; i < row + count; ++i) {
                float* result = partial(block, i, segment);
                std::copy_n(own_.peaks.data() + i * heads_, heads_, result);
                std::copy_n(own_.weights.data() + i * heads_, heads_, result + heads_);
                std::copy_n(own_.sums.data() + i * heads_ * padded_, heads_ * padded_, result + 2 * heads_);
            }
        }
    }

    float* partial(const Block& block, int64_t row, int64_t segment) const {
        const int64_t place = row * (block.last - block.first) + segment - block.first;
        return plan_.partial.data() + block.partial + place * heads_ * (padded_ + 2);
    }

    /// Rows of q as floats, turned by their angles, scaled, each head padded with zeros.
    void read_queries(const Row* rows, int64_t from, int64_t count) {
        for (int64_t row = from; row < from + count; ++row) {
            float* to = own_.q.data() + row * heads_ * padded_;
            if (shape_.q_bfloat16)
                read_query<Bfloat16>(rows[row].row, to);
            else
                read_query<float>(rows[row].row, to);
        }
    }

    template <typename From>
    void read_query(int64_t row, float* to) const {
        const From* q = static_cast<const From*>(tensors_.q) + row * shape_.q_stride + first_ * group_ * shape_.head_dim;
        if (!tensors_.cos) return read_heads(q, heads_, float(shape_.scale), to);
        const int64_t dim = shape_.head_dim;
        const From *cos = static_cast<const From*>(tensors_.cos) + row * dim, *sin = static_cast<const From*>(tensors_.sin) + row * dim;
        for (int64_t head = 0; head < heads_; ++head, to += padded_) {
            rotate(q + head * dim, cos, sin, dim, float(shape_.scale), to);
            std::fill(to + dim, to + padded_, 0.0f);
        }
    }

    template <typename From>
    void read_heads(const From* from, int64_t heads, float scale, float* to) const {
        const int64_t dim = shape_.head_dim;
        for (int64_t head = 0; head < heads; ++head, from += dim, to += padded_) {
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) store(to + i, load(from + i) * scale);
            for (; i < dim; ++i) to[i] = wide(from[i]) * scale;
            for (; i < padded_; ++i) to[i] = 0;
        }
    }

    const T* place(const T* store, int64_t slot) const { return store + slot * slot_ + first_ * shape_.head_dim; }

    /// Inlined, since a compiler sees no effect in a call of this and leaves it out.
    __attribute__((always_inline)) void prefetch(const T* store, const int64_t* slots, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const char* from = reinterpret_cast<const char*>(place(store, slots[i]));
            for (int64_t byte = 0; byte < kv_heads_ * shape_.head_dim * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(from + byte, 0, 2);
        }
    }

    /// One segment for rows [from, from + count): folded into what they have, or its peaks, weights and sums left as they are.
    template <bool FOLDS>
    void attend(const Row* rows, int64_t from, int64_t count, int64_t segment, bool more) {
        const int64_t start = segment * SEGMENT;
        int64_t stop = 0;
        for (int64_t row = from; row < from + count; ++row) stop = std::max(stop, rows[row].stop);
        const int64_t keys = std::min<int64_t>(SEGMENT, stop - start), after = more ? std::min<int64_t>(SEGMENT, stop - start - keys) : 0;
        const int64_t* slots = rows[from].slots + start;
        const T *k = static_cast<const T*>(tensors_.keys), *v = static_cast<const T*>(tensors_.values);
        auto both = [&](auto scores, auto sums) {
            scores();
            soften(rows, from, count, start, keys);
            if constexpr (FOLDS) weigh(from, count, own_.peaks.data() + from * heads_, own_.weights.data() + from * heads_);
            sums();
        };
        constexpr Pass SUM = FOLDS ? FOLDED : SUMS;
        auto of_few = [&](auto sample) {
            using From = decltype(sample);
            both([&] { pass<SCORES, From>(k, slots, keys, v, slots, keys, from, count); },
                 [&] { pass<SUM, From>(v, slots, keys, k, slots + keys, after, from, count); });
        };
        if (count * group_ >= MANY) {
            arrange(from, count);
            both([&] { pass_of_many<SCORES>(k, slots, keys, v, slots, keys, rows, start); },
                 [&] { pass_of_many<SUM>(v, slots, keys, k, slots + keys, after, rows, start); });
        } else if (whole_vectors_) {
            of_few(T{});  // widened as they are used
        } else {
            of_few(float{});
        }
    }

    enum Pass { SCORES, SUMS, FOLDED };

    /// Over a segment's keys (scores) or values (sums) for few rows, a KV head after the other.
    template <Pass PASS, typename From>
    void pass(const T* store, const int64_t* slots, int64_t keys, const T* next, const int64_t* next_slots, int64_t next_keys, int64_t from,
              int64_t count) {
        const From* at[SEGMENT];
        const char *own[SEGMENT], *others[SEGMENT];
        for (int64_t key = 0; key < keys; ++key) {
            const T* place_of = place(store, slots[key]);
            own[key] = reinterpret_cast<const char*>(place_of);
            others[key] = next_keys ? reinterpret_cast<const char*>(place(next, next_slots[std::min(key, next_keys - 1)])) : own[key];
            if constexpr (std::is_same_v<From, T>) {
                at[key] = place_of;
                if (whole_vectors_) continue;
            }
            if constexpr (std::is_same_v<From, float>) {
                float* row = own_.tile.data() + key * kv_heads_ * padded_;
                read_heads(place_of, kv_heads_, 1.0f, row);
                at[key] = row;
            }
        }
        for (int64_t key = keys; key % 4; ++key) at[key] = at[keys - 1], own[key] = own[keys - 1], others[key] = others[keys - 1];
        const int64_t bytes = shape_.head_dim * int64_t(sizeof(T)), parts = padded_ / WIDE + padded_ % WIDE / LANES;
        const int64_t steps = kv_heads_ * (PASS == SCORES ? 1 : parts) * ((keys + 3) / 4);
        Ahead ahead{own, 0, others, next_keys, kv_heads_ * bytes, ((next_keys << 20) + steps - 1) / steps, 0};
        for (int64_t head = 0; head < kv_heads_; ++head) {
            ahead.byte += bytes;
            if (head + 1 == kv_heads_) ahead.nearby = others, ahead.byte = 0;
            heads<PASS>(at, keys, head, from, count, ahead);
        }
    }

    /// Keys of one KV head for all query heads that read it, three of them at a time.
    template <Pass PASS, typename From>
    __attribute__((noinline)) void heads(const From* const* at, int64_t keys, int64_t kv_head, int64_t from, int64_t count, Ahead& ahead) {
        const int64_t offset = kv_head * padded_, heads = count * group_;
        auto threes = [&](auto rows) {  // of query heads
            for (int64_t i = 0; i < heads; i += 3) {
                const int64_t now = std::min<int64_t>(3, heads - i);
                int64_t head[3];
                for (int64_t j = 0; j < now; ++j) head[j] = (from + (i + j) / group_) * heads_ + kv_head * group_ + (i + j) % group_;
                Ahead* ask = i ? nullptr : &ahead;
                switch (now) {
                    case 3: rows(head, ask, std::integral_constant<int, 3>()); break;
                    case 2: rows(head, ask, std::integral_constant<int, 2>()); break;
                    default: rows(head, ask, std::integral_constant<int, 1>());
                }
            }
        };
        if constexpr (PASS == SCORES) {
            threes([&](const int64_t* head, auto ask, auto count) { dots<count()>(head, at, keys, offset, ask); });
        } else {  // a part of the values after the other, so that it stays near while all heads use it
            int64_t i = 0;
            for (; i + WIDE <= padded_; i += WIDE)
                threes([&](const int64_t* head, auto ask, auto count) { add<PASS, count(), WIDE / LANES>(head, at, keys, offset, i, ask); });
            for (; i < padded_; i += LANES)
                threes([&](const int64_t* head, auto ask, auto count) { add<PASS, count(), 1>(head, at, keys, offset, i, ask); });
        }
    }

    template <int ROWS, typename From>
    void dots(const int64_t* head, const From* const* at, int64_t count, int64_t offset, Ahead* ahead) {
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
            for (int j = 0; j < 4; ++j) keys[j] = at[key + j] + offset;
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

    template <Pass PASS, int ROWS, int VECTORS, typename From>
    void add(const int64_t* head, const From* const* at, int64_t keys, int64_t offset, int64_t i, Ahead* ahead) {
        Floats sums[ROWS][VECTORS] = {};
        const float* weights[ROWS];
        for (int row = 0; row < ROWS; ++row) weights[row] = own_.scores.data() + head[row] * SEGMENT;
        const int64_t byte = ahead ? ahead->byte + i * int64_t(sizeof(T)) : 0;
        for (int64_t key = 0; key < keys; ++key) {
            if (ahead) {
                if (key % 4 == 0) ahead->ask_far();
                for (int line = 0; line < VECTORS * LANES * int(sizeof(T)); line += 64) __builtin_prefetch(ahead->nearby[key] + byte + line);
            }
            const From* from = at[key] + offset + i;
            Floats weight[ROWS];
            for (int row = 0; row < ROWS; ++row) weight[row] = held(all(weights[row][key]));
            for (int j = 0; j < VECTORS; ++j) {
                const Floats v = held(load(from + j * LANES));
                for (int row = 0; row < ROWS; ++row) sums[row][j] = multiply_add(weight[row], v, sums[row][j]);
            }
        }
        for (int row = 0; row < ROWS; ++row) keep<PASS>(head[row], i, sums[row]);
    }

    /// The heads of tokens [from, from + count), six by six; kept from segment to segment.
    void arrange(int64_t from, int64_t count) {
        if (from == arranged_from_ && count == arranged_count_) return;
        arranged_from_ = from, arranged_count_ = count;
        sixes_ = 0;
        for (int64_t i = 0; i < count * group_; ++i) {
            Six& six = own_.sixes[size_t(i / SIX)];
            const int64_t token = from + i / group_;
            if (i % SIX == 0) six = {0, token, token, {}}, ++sixes_;
            six.last = token;
            six.head[six.count++] = token * heads_ + i % group_;
        }
    }

    /// Over a segment's keys or values for many rows: a KV head after the other is laid out in panels of floats, and six rows after the other
    /// go through them. What none of six sees is left out.
    template <Pass PASS>
    void pass_of_many(const T* store, const int64_t* slots, int64_t keys, const T* next, const int64_t* next_slots, int64_t next_keys,
                      const Row* rows, int64_t start) {
        const int64_t parts = kv_heads_ * sixes_;
        for (int64_t kv_head = 0, part = 0, asked = 0; kv_head < kv_heads_; ++kv_head) {
            if constexpr (PASS == SCORES)
                lay_keys(store, slots, keys, kv_head);
            else
                lay_values(store, slots, keys, kv_head);
            for (int64_t i = 0; i < sixes_; ++i) {
                const int64_t ask = next_keys * ++part / parts;
                prefetch(next, next_slots + asked, ask - asked);
                asked = ask;
                const Six& six = own_.sixes[size_t(i)];
                const int64_t first = std::max<int64_t>(rows[six.first].first - start, 0), stop = std::min(rows[six.last].stop - start, keys);
                go_through<PASS>(six, kv_head * group_, first, stop);
            }
        }
    }

    template <Pass PASS>
    void go_through(const Six& six, int64_t head, int64_t first, int64_t stop) {
        switch (six.count) {
            case 6: six_rows<PASS, 6>(six, head, first, stop); break;
            case 5: six_rows<PASS, 5>(six, head, first, stop); break;
            case 4: six_rows<PASS, 4>(six, head, first, stop); break;
            case 3: six_rows<PASS, 3>(six, head, first, stop); break;
            case 2: six_rows<PASS, 2>(six, head, first, stop); break;
            default: six_rows<PASS, 1>(six, head, first, stop);
        }
    }

    template <Pass PASS, int ROWS>
    void six_rows(const Six& six, int64_t head, int64_t first, int64_t stop) {
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
        const float* keys = own_.panels.data() + first * padded_;
        if (padded_ == 64)
            panel_scores<ROWS, 64 / LANES>(queries, keys, 64 / LANES, stop - first, scores);
        else
            panel_scores<ROWS, 0>(queries, keys, padded_ / LANES, stop - first, scores);
    }

    template <Pass PASS, int ROWS, int VECTORS>
    __attribute__((noinline)) void values_of(const int64_t* heads, const float* const* weights, int64_t head, int64_t i, int64_t first,
                                             int64_t stop) {
        Floats sums[ROWS][VECTORS];
        panel_sums(weights, own_.panels.data() + i * SEGMENT + first * PANEL, stop - first, sums);
        float* const out = (PASS == FOLDED ? own_.folded : own_.sums).data() + head * padded_ + i;
        const float *seen = own_.weights.data() + head, *before = own_.before.data() + head, *now = own_.now.data() + head;
        for (int row = 0; row < ROWS; ++row) {
            const int64_t at = heads[row];
            if (PASS == FOLDED && seen[at] == 0) continue;
            for (int j = 0; j < VECTORS; ++j) {
                float* to = out + at * padded_ + j * LANES;
                agentrt::store(to, PASS == FOLDED ? folded(to, sums[row][j], before[at], now[at]) : sums[row][j]);
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
    __attribute__((noinline)) void lay_keys(const T* store, const int64_t* slots, int64_t keys, int64_t kv_head) {
        for (int64_t key = 0; key < keys; key += 8) {
            const T* from[8];
            for (int64_t j = 0; j < 8; ++j) from[j] = place(store, slots[std::min(key + j, keys - 1)]) + kv_head * shape_.head_dim;
            float* to = own_.panels.data() + key / PANEL * PANEL * padded_ + key % PANEL;
            for (int64_t i = 0; i < padded_; i += LANES) {
                Floats lanes[8];
                for (int j = 0; j < 8; ++j) lanes[j] = dimensions(from[j], i);
                store_columns(lanes, to + i * PANEL, PANEL);
            }
        }
    }

    /// A KV head's values: panels of dimensions, in each a key after the other.
    __attribute__((noinline)) void lay_values(const T* store, const int64_t* slots, int64_t keys, int64_t kv_head) {
        for (int64_t key = 0; key < keys; ++key) {
            const T* from = place(store, slots[key]) + kv_head * shape_.head_dim;
            float* to = own_.panels.data() + key * PANEL;
            for (int64_t i = 0; i < padded_; i += LANES) agentrt::store(to + i / PANEL * PANEL * SEGMENT + i % PANEL, dimensions(from, i));
        }
    }

    /// A segment's sums, folded into what a head has, or left as they are.
    template <Pass PASS, int VECTORS>
    void keep(int64_t head, int64_t i, const Floats (&sums)[VECTORS]) {
        if (PASS != FOLDED) {
            for (int j = 0; j < VECTORS; ++j) store(own_.sums.data() + head * padded_ + i + j * LANES, sums[j]);
        } else if (own_.weights[size_t(head)] != 0) {  // else nothing was seen
            for (int j = 0; j < VECTORS; ++j) fold_vector(head, i + j * LANES, sums[j]);
        }
    }

    /// Scores become weights; those of keys that a row does not see become 0.
    void soften(const Row* rows, int64_t from, int64_t count, int64_t start, int64_t keys) {
        bool all_seen = keys == SEGMENT && shape_.softcap == 0;
        for (int64_t row = from; row < from + count && all_seen; ++row) all_seen = rows[row].first <= start && rows[row].stop >= start + SEGMENT;
        if (all_seen) return soften_rows<true>(from * heads_, count * heads_, 0, SEGMENT, SEGMENT);
        for (int64_t row = from; row < from + count; ++row)
            soften_rows<false>(row * heads_, heads_, int(std::max<int64_t>(rows[row].first - start, 0)), int(std::min(rows[row].stop - start, keys)),
                               keys);
    }

    template <bool ALL_SEEN>
    void soften_rows(int64_t head, int64_t count, int first, int stop, int64_t keys) {
        for (; count > 0; head += 4, count -= 4) soften_heads<ALL_SEEN>(head, std::min<int64_t>(4, count), first, stop, keys);
    }

    /// Up to four heads: all their largest scores first, so that they need not wait for each other.
    template <bool ALL_SEEN>
    __attribute__((noinline)) void soften_heads(int64_t head, int64_t count, int first, int stop, int64_t keys) {
        static_assert(SEGMENT / LANES % 4 == 0);
        Ints lanes;
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane;
        const int64_t vectors = ALL_SEEN ? SEGMENT / LANES : (std::max(stop, 0) + LANES - 1) / LANES;  // what comes after them is not seen
        const float cap = float(shape_.softcap);
        float *const scores = own_.scores.data() + head * SEGMENT, *const peaks = own_.peaks.data() + head;
        auto seen = [&](int64_t i) { return (lanes + int(i * LANES) >= first) & (lanes + int(i * LANES) < stop); };
        for (int64_t j = 0; j < count; ++j) {
            Floats most = all(-INFINITY);
            for (int64_t i = 0; i < vectors; ++i) {
                float* at = scores + j * SEGMENT + i * LANES;
                Floats score = load(at);
                if (!ALL_SEEN) {
                    if (cap != 0) score = cap * hyperbolic_tangent(score / cap);
                    score = seen(i) ? score : all(-INFINITY);
                    store(at, score);
                }
                most = larger(score, most);
            }
            peaks[j] = largest(most);
        }
        Floats totals[4];
        for (int64_t j = 0; j < 4; ++j) totals[j] = all(0.0f);
        for (int64_t j = 0; j < count; ++j) {
            const Floats peak = all(peaks[j]);
            float* at = scores + j * SEGMENT;
            auto some = [&](auto size, int64_t i) {
                Floats weights[size()];
                for (int k = 0; k < size(); ++k) weights[k] = load(at + (i + k) * LANES) - peak;
                exponentials(weights);
                for (int k = 0; k < size(); ++k) {
                    if (!ALL_SEEN) weights[k] = seen(i + k) ? weights[k] : all(0.0f);
                    store(at + (i + k) * LANES, weights[k]);
                    totals[j] += weights[k];
                }
            };
            int64_t i = 0;
            for (; i + 4 <= vectors; i += 4) some(std::integral_constant<int, 4>(), i);
            if (!ALL_SEEN)
                for (; i < vectors; ++i) some(std::integral_constant<int, 1>(), i);
            for (i *= LANES; i < keys; i += LANES) store(at + i, all(0.0f));
        }
        sums_of_four(totals, own_.weights.data() + head);
    }

    void begin_fold(int64_t row, int64_t count) {
        const int64_t at = row * heads_, heads = count * heads_;
        std::fill_n(own_.folded_weights.data() + at, heads, 0.0f);
        std::fill_n(own_.folded_peaks.data() + at, heads, -INFINITY);
        std::fill_n(own_.folded.data() + at * padded_, heads * padded_, 0.0f);
    }

    /// Takes a segment's peaks and weights into those of rows [row, row + count), and finds by what their sums are to be multiplied
    /// (`before`) and the segment's (`now`). A weight of 0 means that nothing was seen.
    __attribute__((noinline)) void weigh(int64_t row, int64_t count, const float* peaks, const float* weights) {
        const int64_t begin = row * heads_, heads = count * heads_;
        for (int64_t i = 0; i < heads; i += LANES) {
            const int64_t at = begin + i, lanes = std::min<int64_t>(LANES, heads - i);
            Floats peak = all(-INFINITY), weight = {}, own_peak = all(-INFINITY), own_weight = {};
            if (lanes == LANES) {
                peak = load(peaks + i), weight = load(weights + i);
                own_peak = load(own_.folded_peaks.data() + at), own_weight = load(own_.folded_weights.data() + at);
            } else {
                for (int64_t j = 0; j < lanes; ++j) {
                    peak[j] = peaks[i + j], weight[j] = weights[i + j];
                    own_peak[j] = own_.folded_peaks[size_t(at + j)], own_weight[j] = own_.folded_weights[size_t(at + j)];
                }
            }
            const Floats top = larger(own_peak, (weight == 0.0f) ? own_peak : peak);
            const Floats before = (own_weight == 0.0f) ? all(0.0f) : exponential(own_peak - top);
            const Floats now = (weight == 0.0f) ? all(0.0f) : exponential(peak - top);
            const Floats sums = multiply_add(own_weight, before, weight * now);
            for (int64_t j = 0; j < lanes; ++j) {
                own_.before[size_t(at + j)] = before[j], own_.now[size_t(at + j)] = now[j];
                own_.folded_peaks[size_t(at + j)] = top[j], own_.folded_weights[size_t(at + j)] = sums[j];
            }
        }
    }

    /// A head's sums of a segment, taken into those of the segments before it.
    void fold(int64_t head, const float* sums) {
        for (int64_t i = 0; i < padded_; i += LANES) fold_vector(head, i, load(sums + i));
    }

    void fold_vector(int64_t head, int64_t i, Floats sums) {
        float* to = own_.folded.data() + head * padded_ + i;
        store(to, folded(to, sums, own_.before[size_t(head)], own_.now[size_t(head)]));
    }

    static Floats folded(const float* had, Floats sums, float before, float now) { return multiply_add(load(had), all(before), sums * all(now)); }

    void finish(const Row& row, int64_t at) const {
        const int64_t to = (row.row * shape_.heads + first_ * group_) * shape_.head_dim;
        if (shape_.q_bfloat16)
            write(static_cast<Bfloat16*>(tensors_.out) + to, at);
        else
            write(static_cast<float*>(tensors_.out) + to, at);
    }

    template <typename To>
    void write(To* to, int64_t row) const {
        const int64_t dim = shape_.head_dim;
        for (int64_t head = row * heads_; head < (row + 1) * heads_; ++head, to += dim) {
            const float* folded = own_.folded.data() + head * padded_;
            const float share = 1.0f / own_.folded_weights[size_t(head)];
            int64_t i = 0;
            for (; i + LANES <= dim; i += LANES) store(to + i, load(folded + i) * share);
            for (; i < dim; ++i) narrow(to + i, folded[i] * share);
        }
    }

    const AttentionShape& shape_;
    const Tensors& tensors_;
    Plan& plan_;
    Scratch& own_;
    const int64_t padded_, group_, slot_;
    const bool whole_vectors_;
    int64_t kv_heads_, heads_, first_;  // KV heads that a task is about, query heads that read them, and the first of the KV heads
    int64_t sixes_ = 0, arranged_from_ = 0, arranged_count_ = 0;
};

template <typename T>
void attend(const AttentionShape& shape, const AttentionRuns& runs, const Tensors& tensors, Plan& plan) {
    const bool alone = shape.threads == 1 || plan.multiplications < SMALL;
#pragma omp parallel num_threads(alone ? 1 : int(shape.threads))
    {
        static thread_local Scratch scratch;
        Kernel<T> kernel(shape, tensors, plan, scratch);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < runs.tokens; ++token) kernel.write_token(runs, token);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < int64_t(plan.tasks.size()); ++task) kernel.run(plan.tasks[size_t(task)]);
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < int64_t(plan.split.size()); ++block) kernel.merge(plan.blocks[size_t(plan.split[size_t(block)])]);
    }
}

}  // namespace

extern "C" {

/// Writes k and v of all tokens to their slots, and attends.
///
/// q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], each dense within a token, in one type; cos and sin
/// [tokens, head_dim] in that type, by which q and k are turned first, or null; keys and values [slots, kv_heads, head_dim],
/// dense; out [tokens, heads, head_dim], dense, in q's type.
void agentrt_attention(const AttentionShape* shape, const AttentionRuns* runs, const void* q, const void* k, const void* v, const void* cos,
                       const void* sin, void* keys, void* values, void* out) {
    static thread_local Plan plan;
    const Tensors tensors{q, k, v, cos, sin, keys, values, out};
    Planner(*shape, *runs, plan).make();
    if (shape->kv_kind == 2)
        attend<Float16>(*shape, *runs, tensors, plan);
    else if (shape->kv_kind == 1)
        attend<Bfloat16>(*shape, *runs, tensors, plan);
    else
        attend<float>(*shape, *runs, tensors, plan);
}
}
