// Attention of runs of new tokens over scattered slots: the CPU's own form of `agentrt.attention.base.Attention`.
//
// New keys and values are written to their slots; then every new token attends to its sequence's slots up to itself. A
// sequence is read in segments of 64 tokens, counted from its beginning, all KV heads of a slot together. A segment gives
// each row (a token, one of its heads) a largest score, a sum of weights and a weighted sum of values, in float32; a row's
// segments are folded in order (log-sum-exp, after Dao et al., FlashAttention, 2022). Rows that read the same segments
// (neighbours in a run, or runs that share a prefix) read them together.
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
constexpr int NEAR = 16;          // keys that all rows go through before the next
constexpr int MOST_ROWS = 16;     // tokens that may read a segment together
constexpr int64_t TILE = 16384;   // floats of q that such rows may have: as much again for their sums, and all fits the cache
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

/// The runs of a step, as in `agentrt.attention.base.AttentionBatch`.
struct AttentionRuns {
    int64_t count, tokens;
    const int64_t* first_row;      // [count]: the run's first row of q
    const int64_t* query_lengths;  // [count]; 0: the run's keys and values are written, and somebody else attends
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
    int64_t partial = -1;  // where its segments' results lie, if several tasks share the block
};

/// Segments [first, last) of a block; `row` is -1 for those that all rows read, else whose.
struct Task {
    int64_t block, row, first, last;
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
        most_ = std::clamp<int64_t>(TILE / width_, 1, MOST_ROWS);
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
            if (!grouped_[size_t(run)]) alone(run);
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
            Block block{int64_t(plan_.rows.size()), 0, 0, common, common};
            for (int64_t i = 0; i < runs_.group_sizes[group]; ++i) {
                const int64_t run = members[i], length = runs_.query_lengths[run];
                if (length > most_) continue;  // read in blocks of their own, which is sharing enough
                grouped_[size_t(run)] = true;
                if (!length) continue;
                if (block.count && block.count + length > most) {
                    plan_.blocks.push_back(block);
                    block = {int64_t(plan_.rows.size()), 0, 0, common, common};
                }
                add(run, 0, length);
                block.count += length;
            }
            if (block.count) plan_.blocks.push_back(block);
        }
    }

    void alone(int64_t run) {
        for (int64_t token = 0; token < runs_.query_lengths[run]; token += most_) {
            const int64_t count = std::min(most_, runs_.query_lengths[run] - token), begin = int64_t(plan_.rows.size());
            add(run, token, count);
            const int64_t last = segments(plan_.rows.back().stop);
            plan_.blocks.push_back({begin, count, plan_.rows[size_t(begin)].first / SEGMENT, last, last});
        }
    }

    /// Blocks become tasks; with too few of them for the threads, each is split.
    void divide() {
        int64_t pieces = 0, room = 0;
        for (Block& block : plan_.blocks) {
            for (int64_t i = block.begin; i < block.begin + block.count; ++i)
                block.last = std::max(block.last, segments(plan_.rows[size_t(i)].stop));
            pieces += block.last - block.first;
        }
        const bool few = shape_.threads > 1 && plan_.multiplications > SMALL && int64_t(plan_.blocks.size()) < 4 * shape_.threads;
        const int64_t piece = std::max<int64_t>(1, pieces / (4 * shape_.threads));
        for (int64_t at = 0; at < int64_t(plan_.blocks.size()); ++at) {
            Block& block = plan_.blocks[size_t(at)];
            const int64_t count = block.last - block.first;
            if (!few || count <= piece || block.count * count > 8192) {
                plan_.tasks.push_back({at, -1, block.first, block.last});
                continue;
            }
            block.partial = room;
            room += block.count * count * (width_ + 2 * shape_.heads);
            plan_.split.push_back(at);
            cut(at, -1, block.first, block.common, piece);
            for (int64_t row = 0; row < block.count; ++row)
                cut(at, row, block.common, segments(plan_.rows[size_t(block.begin + row)].stop), piece);
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

/// A thread's memory; kept, since fresh memory costs page faults.
struct Scratch {
    std::vector<float> q, sums, folded, scores, tile, peaks, weights, folded_peaks, folded_weights, before, now;

    static void hold(std::vector<float>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size_t(size));
    }
};

/// The arithmetic, for keys and values of type T.
template <typename T>
class Kernel {
public:
    Kernel(const AttentionShape& shape, const Tensors& tensors, Plan& plan, Scratch& scratch)
        : shape_(shape), tensors_(tensors), plan_(plan), own_(scratch), padded_(padded(shape.head_dim)), group_(shape.heads / shape.kv_heads),
          slot_(shape.kv_heads * shape.head_dim), whole_vectors_(padded_ == shape.head_dim) {
        const int64_t rows = MOST_ROWS * shape.heads;
        Scratch::hold(own_.q, rows * padded_);
        Scratch::hold(own_.sums, rows * padded_);
        Scratch::hold(own_.folded, rows * padded_);
        Scratch::hold(own_.scores, rows * SEGMENT);
        Scratch::hold(own_.tile, SEGMENT * shape.kv_heads * padded_);
        for (auto* memory : {&own_.peaks, &own_.weights, &own_.folded_peaks, &own_.folded_weights, &own_.before, &own_.now})
            Scratch::hold(*memory, rows + LANES);
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
                std::copy_n(own_.peaks.data() + i * shape_.heads, shape_.heads, result);
                std::copy_n(own_.weights.data() + i * shape_.heads, shape_.heads, result + shape_.heads);
                std::copy_n(own_.sums.data() + i * shape_.heads * padded_, shape_.heads * padded_, result + 2 * shape_.heads);
            }
        }
    }

    float* partial(const Block& block, int64_t row, int64_t segment) const {
        const int64_t place = row * (block.last - block.first) + segment - block.first;
        return plan_.partial.data() + block.partial + place * shape_.heads * (padded_ + 2);
    }

    /// Rows of q as floats, turned by their angles, scaled, each head padded with zeros.
    void read_queries(const Row* rows, int64_t from, int64_t count) {
        for (int64_t row = from; row < from + count; ++row) {
            float* to = own_.q.data() + row * shape_.heads * padded_;
            if (shape_.q_bfloat16)
                read_query<Bfloat16>(rows[row].row, to);
            else
                read_query<float>(rows[row].row, to);
        }
    }

    template <typename From>
    void read_query(int64_t row, float* to) const {
        const From* q = static_cast<const From*>(tensors_.q) + row * shape_.q_stride;
        if (!tensors_.cos) return read_heads(q, shape_.heads, float(shape_.scale), to);
        const int64_t dim = shape_.head_dim;
        const From *cos = static_cast<const From*>(tensors_.cos) + row * dim, *sin = static_cast<const From*>(tensors_.sin) + row * dim;
        for (int64_t head = 0; head < shape_.heads; ++head, to += padded_) {
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

    /// Eight slots of keys or values: where they are, or as floats in a tile; beyond the last slot, the last one again.
    template <typename From>
    void fetch(const T* store, const int64_t* slots, int64_t at, int64_t keys, const From* to[8]) {
        for (int64_t i = 0; i < 8; ++i) {
            const T* from = store + slots[std::min(at + i, keys - 1)] * slot_;
            if constexpr (std::is_same_v<From, T>) {
                if (whole_vectors_) {
                    to[i] = from;
                    continue;
                }
            }
            if constexpr (std::is_same_v<From, float>) {
                float* row = own_.tile.data() + (at + i) * shape_.kv_heads * padded_;
                if (at + i < keys) read_heads(from, shape_.kv_heads, 1.0f, row);
                to[i] = at + i < keys ? row : to[i - 1];
            }
        }
    }

    void prefetch(const T* store, const int64_t* slots, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const char* from = reinterpret_cast<const char*>(store + slots[i] * slot_);
            for (int64_t byte = 0; byte < slot_ * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(from + byte, 0, 2);
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
        // Read once or twice, 16 bits are widened as they are used; for more rows they are laid out as floats.
        const bool in_place = whole_vectors_ && (std::is_same_v<T, float> || count * group_ <= 6);
        auto both = [&](auto sample) {
            using From = decltype(sample);
            pass<SCORES, From>(k, slots, keys, v, slots, keys, from, count);
            for (int64_t row = from; row < from + count; ++row) soften(row, rows[row].first - start, rows[row].stop - start, keys);
            if constexpr (FOLDS) weigh(from, count, own_.peaks.data() + from * shape_.heads, own_.weights.data() + from * shape_.heads);
            pass<FOLDS ? FOLDED : SUMS, From>(v, slots, keys, k, slots + keys, after, from, count);
        };
        if (in_place)
            both(T{});
        else
            both(float{});
    }

    enum Pass { SCORES, SUMS, FOLDED };

    /// Over a segment's keys (scores) or values (sums), a head after the other. What is read next is asked for meanwhile, a part at a time.
    template <Pass PASS, typename From>
    void pass(const T* store, const int64_t* slots, int64_t keys, const T* next, const int64_t* next_slots, int64_t next_keys, int64_t from,
              int64_t count) {
        const From* at[SEGMENT];
        const int64_t eights = (keys + 7) / 8 * 8, piece = PASS == SCORES || count * group_ <= 8 ? NEAR : SEGMENT;
        for (int64_t key = 0; key < keys; key += 8) fetch(store, slots, key, keys, at + key);
        const int64_t parts = shape_.kv_heads * ((eights + piece - 1) / piece);
        for (int64_t head = 0, part = 0, asked = 0; head < shape_.kv_heads; ++head)
            for (int64_t key = 0; key < eights; key += piece) {
                const int64_t ask = next_keys * ++part / parts;
                prefetch(next, next_slots + asked, ask - asked);
                asked = ask;
                const int64_t stop = std::min(key + piece, eights);
                heads<PASS>(at, key, stop, stop == eights, head, from, count);
            }
    }

    /// Keys [key, stop) of one KV head, a multiple of eight, for all query heads that read it, three of them at a time.
    template <Pass PASS, typename From>
    __attribute__((noinline)) void heads(const From* const* at, int64_t key, int64_t stop, bool last, int64_t kv_head, int64_t from, int64_t count) {
        const int64_t offset = kv_head * padded_, heads = count * group_;
        auto threes = [&](auto rows) {  // of query heads
            for (int64_t i = 0; i < heads; i += 3) {
                const int64_t now = std::min<int64_t>(3, heads - i);
                int64_t head[3];
                for (int64_t j = 0; j < now; ++j) head[j] = (from + (i + j) / group_) * shape_.heads + kv_head * group_ + (i + j) % group_;
                switch (now) {
                    case 3: rows(head, std::integral_constant<int, 3>()); break;
                    case 2: rows(head, std::integral_constant<int, 2>()); break;
                    default: rows(head, std::integral_constant<int, 1>());
                }
            }
        };
        if constexpr (PASS == SCORES) {
            threes([&](const int64_t* head, auto count) { dots<count()>(head, at, key, stop, offset); });
        } else {  // a part of the values after the other, so that it stays near while all heads use it
            int64_t i = 0;
            for (; i + 4 * LANES <= padded_; i += 4 * LANES)
                threes([&](const int64_t* head, auto count) { add<PASS, count(), 4>(head, at, key, stop, last, offset, i); });
            for (; i < padded_; i += LANES)
                threes([&](const int64_t* head, auto count) { add<PASS, count(), 1>(head, at, key, stop, last, offset, i); });
        }
    }

    template <int ROWS, typename From>
    void dots(const int64_t* head, const From* const* at, int64_t key, int64_t stop, int64_t offset) {
        const float* queries[ROWS];
        for (int row = 0; row < ROWS; ++row) queries[row] = own_.q.data() + head[row] * padded_;
        for (; key < stop; key += 4) {
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
    void add(const int64_t* head, const From* const* at, int64_t key, int64_t stop, bool last, int64_t offset, int64_t i) {
        Floats sums[ROWS][VECTORS] = {};
        const float* weights[ROWS];
        for (int row = 0; row < ROWS; ++row) weights[row] = own_.scores.data() + head[row] * SEGMENT;
        if (key)
            for (int row = 0; row < ROWS; ++row)
                for (int j = 0; j < VECTORS; ++j) sums[row][j] = load(own_.sums.data() + head[row] * padded_ + i + j * LANES);
        for (; key < stop; ++key) {
            const From* from = at[key] + offset + i;
            Floats weight[ROWS];
            for (int row = 0; row < ROWS; ++row) weight[row] = held(all(weights[row][key]));
            for (int j = 0; j < VECTORS; ++j) {
                const Floats v = held(load(from + j * LANES));
                for (int row = 0; row < ROWS; ++row) sums[row][j] = multiply_add(weight[row], v, sums[row][j]);
            }
        }
        for (int row = 0; row < ROWS; ++row) {
            if (PASS == FOLDED && last) {
                if (own_.weights[size_t(head[row])] == 0) continue;  // nothing was seen
                for (int j = 0; j < VECTORS; ++j) fold_vector(head[row], i + j * LANES, sums[row][j]);
            } else {
                for (int j = 0; j < VECTORS; ++j) store(own_.sums.data() + head[row] * padded_ + i + j * LANES, sums[row][j]);
            }
        }
    }

    /// Scores of one row become weights; those outside [first, stop) become 0.
    void soften(int64_t row, int64_t first, int64_t stop, int64_t keys) {
        const bool all_seen = first <= 0 && stop >= SEGMENT && keys == SEGMENT && shape_.softcap == 0;
        for (int64_t head = row * shape_.heads; head < (row + 1) * shape_.heads; ++head)
            if (all_seen)
                soften_head<true>(head, 0, SEGMENT, SEGMENT);
            else
                soften_head<false>(head, int(std::max<int64_t>(first, 0)), int(std::min(stop, keys)), keys);
    }

    template <bool ALL_SEEN>
    void soften_head(int64_t head, int first, int stop, int64_t keys) {
        Ints lanes;
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane;
        const int64_t vectors = ALL_SEEN ? SEGMENT / LANES : (keys + LANES - 1) / LANES;
        const float cap = float(shape_.softcap);
        float* scores = own_.scores.data() + head * SEGMENT;
        auto seen = [&](int64_t i) { return (lanes + int(i * LANES) >= first) & (lanes + int(i * LANES) < stop); };
        Floats most = all(-INFINITY);
        for (int64_t i = 0; i < vectors; ++i) {
            Floats score = load(scores + i * LANES);
            if (!ALL_SEEN) {
                if (cap != 0) score = cap * hyperbolic_tangent(score / cap);
                score = seen(i) ? score : all(-INFINITY);
                store(scores + i * LANES, score);
            }
            most = larger(score, most);
        }
        const float peak = largest(most);
        Floats total = {};
        for (int64_t i = 0; i < vectors; ++i) {
            Floats weight = exponential(load(scores + i * LANES) - peak);
            if (!ALL_SEEN) weight = seen(i) ? weight : all(0.0f);
            store(scores + i * LANES, weight);
            total += weight;
        }
        own_.peaks[size_t(head)] = peak;
        own_.weights[size_t(head)] = sum(total);
    }

    void begin_fold(int64_t row, int64_t count) {
        const int64_t at = row * shape_.heads, heads = count * shape_.heads;
        std::fill_n(own_.folded_weights.data() + at, heads, 0.0f);
        std::fill_n(own_.folded_peaks.data() + at, heads, -INFINITY);
        std::fill_n(own_.folded.data() + at * padded_, heads * padded_, 0.0f);
    }

    /// Takes a segment's peaks and weights into those of rows [row, row + count), and finds by what their sums are to be multiplied
    /// (`before`) and the segment's (`now`). A weight of 0 means that nothing was seen.
    __attribute__((noinline)) void weigh(int64_t row, int64_t count, const float* peaks, const float* weights) {
        const int64_t begin = row * shape_.heads, heads = count * shape_.heads;
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
        float* folded = own_.folded.data() + head * padded_ + i;
        store(folded, multiply_add(load(folded), all(own_.before[size_t(head)]), sums * own_.now[size_t(head)]));
    }

    void finish(const Row& row, int64_t at) const {
        const int64_t width = shape_.heads * shape_.head_dim;
        if (shape_.q_bfloat16)
            write(static_cast<Bfloat16*>(tensors_.out) + row.row * width, at);
        else
            write(static_cast<float*>(tensors_.out) + row.row * width, at);
    }

    template <typename To>
    void write(To* to, int64_t row) const {
        const int64_t dim = shape_.head_dim;
        for (int64_t head = row * shape_.heads; head < (row + 1) * shape_.heads; ++head, to += dim) {
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
