// What rows do in attention whatever their keys and values are: reading q, softmax, folding one segment after the other (log-sum-exp, after Dao et
// al., FlashAttention, 2022), asking for memory ahead. How scores and sums come about is a kernel's, a class made from this one:
//
//     put_key, put_value(from, slot)       write a slot's heads
//     took_queries(row)                    a row's q has been read
//     at_hand<PASS>(places, count, then)   says where a segment's heads are to be read from by few rows, in which type
//     dots, add                            scores, and sums of values, of up to three rows
//     lay_keys, lay_values, six_rows       the same of many rows, from panels
//     softened(values, from, count, all)   scores have become weights; whether each row sees all of the segment
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "attention_plan.h"
#include "team.h"

namespace agentrt {
namespace {

constexpr int WIDE = 4 * LANES;   // dimensions of values that few rows add at once
constexpr int PANEL = 2 * LANES;  // keys, or dimensions of values, that many rows go through before the next
constexpr int SIX = 6;            // rows that do so at once: their sums with a panel of values fill the registers
constexpr int MANY = 6 * SIX;     // rows from which on panels pay: tokens times the query heads of a KV head

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

/// Where the heads of a segment's keys or values lie, bytes of one, and those that the pass after it reads, bytes of all; filled up to fours by the last.
struct Reading {
    const char* const* at;
    int64_t count, bytes;
    const char* const* next;
    int64_t next_count, next_bytes;
};

/// The slots whose keys are read next, and which KV heads of them.
struct Next {
    const int64_t* slots;
    int64_t count, kv_first, kv_count;
};

/// What is asked for while few rows read a KV head of a segment. Nearby: what they read next, the same place of each slot, from the second cache into
/// the first. Far: the slots of the pass after this one, whole, from memory; little by little, since a core waits for few lines at once.
struct Ahead {
    const char* const* nearby;
    int64_t byte;  // of a slot of `nearby`
    const char* const* after;  // what `nearby` is for the last head
    const char* const* far;
    int64_t slots, bytes, step, asked;  // the last two in 2^20ths of a slot
    Coming* coming;                     // what is read when attention is done, if that is known

    /// Inlined, since a compiler sees no effect in a call of this and leaves it out.
    __attribute__((always_inline)) void ask_far() {
        const int64_t first = asked >> 20, stop = std::min((asked += step) >> 20, slots);
        for (int64_t i = first; i < stop; ++i)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(far[i] + at, 0, 2);
        if (coming) coming->ask();
    }
};

/// Rows that go through a panel together: heads of tokens [first, last], by their place among the heads of a block; for the first KV head.
struct Six {
    int64_t count, first, last;
    int64_t head[SIX];
};

/// A thread's memory; kept, since fresh memory costs page faults.
struct Scratch {
    std::vector<float> q, sums, folded, scores, peaks, weights, folded_peaks, folded_weights, before, now;
    std::vector<Six> sixes;

    template <typename Item>
    static void hold(std::vector<Item>& memory, int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size_t(size));
    }
};

enum Pass { SCORES, SUMS, FOLDED };

template <class Kernel>
class Attending {
public:
    /// Bytes of a KV head in the store, of its keys and of its values.
    Attending(const AttentionShape& shape, const Tensors& tensors, Plan& plan, Scratch& scratch, int64_t key_bytes, int64_t value_bytes)
        : shape_(shape), tensors_(tensors), plan_(plan), own_(scratch), padded_(padded(shape.head_dim)), group_(shape.heads / shape.kv_heads),
          key_bytes_(key_bytes), value_bytes_(value_bytes), slot_(shape.kv_heads * shape.head_dim), most_rows_(std::max(TOGETHER * shape.heads, APART * group_)) {
        Scratch::hold(own_.q, std::max(most_rows_ * padded_, slot_));
        Scratch::hold(own_.sums, most_rows_ * padded_);
        Scratch::hold(own_.folded, most_rows_ * padded_);
        Scratch::hold(own_.scores, most_rows_ * SEGMENT);
        Scratch::hold(own_.sixes, (std::max(TOGETHER, APART) * group_ + SIX - 1) / SIX);
        for (auto* memory : {&own_.peaks, &own_.weights, &own_.folded_peaks, &own_.folded_weights, &own_.before, &own_.now})
            Scratch::hold(*memory, most_rows_ + LANES);
        take(0, shape.kv_heads);
    }

    /// Sets what is asked for beside keys and values, by few rows.
    void ask_for(Coming* coming) { coming_ = coming; }

    /// Writes a new token's key, turned by its angles, and its value.
    void write_token(const AttentionRuns& runs, int64_t token) {
        if (shape_.q_bfloat16)
            write_token<Bfloat16>(runs, token);
        else
            write_token<float>(runs, token);
    }

    /// next: what this thread does then, as far as that is known; its first keys are asked for at the end of this.
    void run(const Task& task, const Task* next) {
        const Block& block = plan_.blocks[size_t(task.block)];
        const Row* rows = plan_.rows.data() + block.begin;
        take(task.kv_first, task.kv_count);
        following_ = next ? first_of(*next) : Next{};
        if (block.partial >= 0) {
            const bool common = task.row < 0;
            part(block, rows, common ? 0 : task.row, common ? block.count : 1, task.first, task.last);
        } else {
            whole(block, rows);
        }
    }

    /// Folds what the tasks of a split block left of a KV head.
    void merge(const Block& block, int64_t kv_head) {
        const Row* rows = plan_.rows.data() + block.begin;
        take(kv_head, 1);
        for (int64_t row = 0; row < block.count; ++row) {
            begin_fold(row, 1);
            for (int64_t segment = block.first; segment < segments(rows[row].stop); ++segment) {
                const Partial result = partial(block, row, segment);
                weigh(row, 1, result.peaks, result.weights);
                for (int64_t head = 0; head < heads_; ++head)
                    if (result.weights[head] != 0) fold(row * heads_ + head, result.sums + head * padded_);
            }
            finish(rows[row], row);
        }
    }

protected:
    /// What follows is about these KV heads and those that read them.
    void take(int64_t kv_first, int64_t kv_count) {
        kv_heads_ = kv_count;
        heads_ = kv_heads_ * group_;
        first_ = kv_first;
        arranged_count_ = 0;
        found_ = nullptr;
    }

    template <typename From>
    void write_token(const AttentionRuns& runs, int64_t token) {
        const From *k = static_cast<const From*>(tensors_.k) + token * shape_.k_stride, *v = static_cast<const From*>(tensors_.v) + token * shape_.v_stride;
        const int64_t slot = runs.new_slots[token];
        if (tensors_.cos) {
            const int64_t dim = shape_.head_dim;
            const From *cos = static_cast<const From*>(tensors_.cos) + token * dim, *sin = static_cast<const From*>(tensors_.sin) + token * dim;
            for (int64_t at = 0; at < slot_; at += dim) rotate(k + at, cos, sin, dim, 1.0f, own_.q.data() + at);
            kernel().put_key(own_.q.data(), slot);
        } else {
            kernel().put_key(k, slot);
        }
        kernel().put_value(v, slot);
    }

    /// A block by one task: the common segments, then each row's own; rows of one run stay together.
    void whole(const Block& block, const Row* rows) {
        begin_fold(0, block.count);
        read_queries(rows, 0, block.count);
        for (int64_t segment = block.first; segment < block.common; ++segment)
            attend<true>(rows, 0, block.count, segment, segment + 1 < block.common, segment + 1 == block.last);
        for (int64_t row = 0, count; row < block.count; row += count) {
            for (count = 1; row + count < block.count && rows[row + count].slots == rows[row].slots;) ++count;
            const int64_t last = segments(rows[row + count - 1].stop);
            for (int64_t segment = block.common; segment < last; ++segment)
                attend<true>(rows, row, count, segment, segment + 1 < last, row + count == block.count);
        }
        for (int64_t row = 0; row < block.count; ++row) finish(rows[row], row);
    }

    void part(const Block& block, const Row* rows, int64_t row, int64_t count, int64_t first, int64_t last) {
        read_queries(rows, row, count);
        for (int64_t segment = first; segment < last; ++segment) {
            attend<false>(rows, row, count, segment, segment + 1 < last, true);
            for (int64_t i = row; i < row + count; ++i) {
                const Partial result = partial(block, i, segment);
                std::copy_n(own_.peaks.data() + i * heads_, heads_, result.peaks);
                std::copy_n(own_.weights.data() + i * heads_, heads_, result.weights);
                std::copy_n(own_.sums.data() + i * heads_ * padded_, heads_ * padded_, result.sums);
            }
        }
    }

    /// What a segment gave a row, of the heads at hand.
    struct Partial {
        float *peaks, *weights, *sums;
    };

    Partial partial(const Block& block, int64_t row, int64_t segment) const {
        const int64_t place = row * (block.last - block.first) + segment - block.first, heads = shape_.heads, first = first_ * group_;
        float* const of = plan_.partial.data() + block.partial + place * heads * (padded_ + 2);
        return {of + first, of + heads + first, of + 2 * heads + first * padded_};
    }

    /// The first keys of a task.
    Next first_of(const Task& task) const {
        const Block& block = plan_.blocks[size_t(task.block)];
        const Row& row = plan_.rows[size_t(block.begin + (task.row < 0 ? block.count - 1 : task.row))];
        const int64_t start = task.first * SEGMENT;
        return {row.slots + start, std::min<int64_t>(SEGMENT, row.stop - start), task.kv_first, task.kv_count};
    }

    /// Rows of q as floats, turned by their angles, scaled, each head padded with zeros.
    void read_queries(const Row* rows, int64_t from, int64_t count) {
        for (int64_t row = from; row < from + count; ++row) {
            float* to = own_.q.data() + row * heads_ * padded_;
            if (shape_.q_bfloat16)
                read_query<Bfloat16>(rows[row].row, to);
            else
                read_query<float>(rows[row].row, to);
            kernel().took_queries(row);
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

    /// Places of some slots, from a KV head on, filled up to fours by the last.
    void find(const void* store, int64_t bytes, const int64_t* slots, int64_t count, int64_t kv_first, const char** to) const {
        const char* const heads = static_cast<const char*>(store) + kv_first * bytes;
        for (int64_t key = 0; key < count; ++key) to[key] = heads + slots[key] * shape_.kv_heads * bytes;
        for (int64_t key = count; key % 4; ++key) to[key] = to[count - 1];
    }

    /// Inlined, since a compiler sees no effect in a call of this and leaves it out.
    __attribute__((always_inline)) void prefetch(const char* const* places, int64_t count, int64_t bytes) const {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(places[i] + byte, 0, 2);
    }

    /// One segment for rows [from, from + count): folded into what they have, or its peaks, weights and sums left as they are. more: whether they read the
    /// segment after it too; ends: if not, whether the task ends with this one.
    template <bool FOLDS>
    void attend(const Row* rows, int64_t from, int64_t count, int64_t segment, bool more, bool ends) {
        constexpr Pass SUM = FOLDS ? FOLDED : SUMS;
        const int64_t start = segment * SEGMENT;
        int64_t stop = 0;
        for (int64_t row = from; row < from + count; ++row) stop = std::max(stop, rows[row].stop);
        const int64_t keys = std::min<int64_t>(SEGMENT, stop - start);
        const int64_t* slots = rows[from].slots + start;
        const Next next = more ? Next{slots + keys, std::min<int64_t>(SEGMENT, stop - start - keys), first_, kv_heads_} : ends ? following_ : Next{};
        if (slots != found_ || keys != found_count_) find(tensors_.keys, key_bytes_, slots, keys, first_, keys_at_);
        find(tensors_.values, value_bytes_, slots, keys, first_, values_at_);
        const Reading first{keys_at_, keys, key_bytes_, values_at_, keys, kv_heads_ * value_bytes_};
        const Reading then{values_at_, keys, value_bytes_, next_at_, next.count, next.kv_count * key_bytes_};
        const bool many = count * group_ >= MANY;
        if (many) {
            arrange(from, count);
            pass_of_many<SCORES>(first, rows, start);
        } else {
            pass_of_few<SCORES>(first, from, count);
        }
        find(tensors_.keys, key_bytes_, next.slots, next.count, next.kv_first, next_at_);
        const bool all_seen = soften(rows, from, count, start, keys);
        kernel().softened(then, from, count, all_seen);
        if constexpr (FOLDS) weigh(from, count, own_.peaks.data() + from * heads_, own_.weights.data() + from * heads_);
        if (many)
            pass_of_many<SUM>(then, rows, start);
        else
            pass_of_few<SUM>(then, from, count);
        std::swap(keys_at_, next_at_);
        found_ = next.slots, found_count_ = next.count;
    }

    /// For few rows, a KV head after the other.
    template <Pass PASS>
    void pass_of_few(const Reading& reading, int64_t from, int64_t count) {
        const int64_t keys = reading.count, next = reading.next_count, whole = (keys + 3) / 4;
        const int64_t parts = padded_ / WIDE + padded_ % WIDE / LANES, steps = kv_heads_ * (PASS == SCORES ? 1 : parts) * whole;
        Ahead ahead{reading.at, 0, next < keys ? reading.at : reading.next, reading.next, next, reading.next_bytes, ((next << 20) + steps - 1) / steps, 0, coming_};
        kernel().template at_hand<PASS>(reading.at, keys, [&](auto from_type, const char* const* at, int64_t stride) {
            for (int64_t head = 0; head < kv_heads_; ++head) {
                ahead.byte += reading.bytes;
                if (head + 1 == kv_heads_) ahead.nearby = ahead.after, ahead.byte = 0;
                heads<PASS, decltype(from_type)>(at, keys, head, head * stride, from, count, ahead);
            }
        });
    }

    /// Keys of one KV head for all query heads that read it, three of them at a time.
    template <Pass PASS, typename From>
    __attribute__((noinline)) void heads(const char* const* at, int64_t keys, int64_t kv_head, int64_t offset, int64_t from, int64_t count,
                                         Ahead& ahead) {
        const int64_t heads = count * group_;
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
            threes([&](const int64_t* head, auto ask, auto count) { kernel().template dots<From, count()>(head, at, keys, kv_head, offset, ask); });
        } else {  // a part of the values after the other, so that it stays near while all heads use it
            int64_t i = 0;
            for (; i + WIDE <= padded_; i += WIDE)
                threes([&](const int64_t* head, auto ask, auto count) { kernel().template add<PASS, From, count(), WIDE / LANES>(head, at, keys, offset, i, ask); });
            for (; i < padded_; i += LANES)
                threes([&](const int64_t* head, auto ask, auto count) { kernel().template add<PASS, From, count(), 1>(head, at, keys, offset, i, ask); });
        }
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

    /// For many rows: a KV head after the other is laid out in panels, and six rows after the other go through them. What none of six sees is left out.
    template <Pass PASS>
    void pass_of_many(const Reading& reading, const Row* rows, int64_t start) {
        const int64_t parts = kv_heads_ * sixes_;
        for (int64_t kv_head = 0, part = 0, asked = 0; kv_head < kv_heads_; ++kv_head) {
            if constexpr (PASS == SCORES)
                kernel().lay_keys(reading, kv_head);
            else
                kernel().lay_values(reading, kv_head);
            for (int64_t i = 0; i < sixes_; ++i) {
                const int64_t ask = reading.next_count * ++part / parts;
                prefetch(reading.next + asked, ask - asked, reading.next_bytes);
                asked = ask;
                const Six& six = own_.sixes[size_t(i)];
                const int64_t first = std::max<int64_t>(rows[six.first].first - start, 0), stop = std::min(rows[six.last].stop - start, reading.count);
                go_through<PASS>(six, kv_head, first, stop);
            }
        }
    }

    template <Pass PASS>
    void go_through(const Six& six, int64_t kv_head, int64_t first, int64_t stop) {
        switch (six.count) {
            case 6: kernel().template six_rows<PASS, 6>(six, kv_head, first, stop); break;
            case 5: kernel().template six_rows<PASS, 5>(six, kv_head, first, stop); break;
            case 4: kernel().template six_rows<PASS, 4>(six, kv_head, first, stop); break;
            case 3: kernel().template six_rows<PASS, 3>(six, kv_head, first, stop); break;
            case 2: kernel().template six_rows<PASS, 2>(six, kv_head, first, stop); break;
            default: kernel().template six_rows<PASS, 1>(six, kv_head, first, stop);
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

    /// Scores become weights; those of keys that a row does not see become 0. Whether there are none, and the segment is whole.
    bool soften(const Row* rows, int64_t from, int64_t count, int64_t start, int64_t keys) {
        bool all_seen = keys == SEGMENT && shape_.softcap == 0;
        for (int64_t row = from; row < from + count && all_seen; ++row) all_seen = rows[row].first <= start && rows[row].stop >= start + SEGMENT;
        if (all_seen) {
            soften_rows<true>(from * heads_, count * heads_, 0, SEGMENT, SEGMENT);
            return true;
        }
        for (int64_t row = from; row < from + count; ++row)
            soften_rows<false>(row * heads_, heads_, int(std::max<int64_t>(rows[row].first - start, 0)), int(std::min(rows[row].stop - start, keys)),
                               keys);
        return false;
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
    const int64_t padded_, group_, key_bytes_, value_bytes_, slot_, most_rows_;
    int64_t kv_heads_, heads_, first_;  // KV heads that a task is about, query heads that read them, and the first of the KV heads

private:
    Kernel& kernel() { return static_cast<Kernel&>(*this); }

    int64_t sixes_ = 0, arranged_from_ = 0, arranged_count_ = 0;
    const char* places_[3][SEGMENT];
    const char **keys_at_ = places_[0], **values_at_ = places_[1], **next_at_ = places_[2];
    Next following_{};
    Coming* coming_ = nullptr;
    const int64_t* found_ = nullptr;  // slots whose keys' places are known, so many
    int64_t found_count_ = 0;
};

/// All of a step, shared: writes what is new, then attends. Memory: a kernel's own for a thread.
template <class Kernel, class Memory>
void attend(const AttentionShape& shape, const AttentionRuns& runs, const Tensors& tensors, Plan& plan, Coming* coming) {
    static thread_local Memory memory;
    Kernel kernel(shape, tensors, plan, memory);
    kernel.ask_for(coming);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < runs.tokens; ++token) kernel.write_token(runs, token);
    const int64_t shares = int64_t(plan.shares.size()) - 1, merges = int64_t(plan.split.size()) * shape.kv_heads;
    auto task = [&](int64_t at) { return plan.tasks.data() + at; };
#pragma omp for schedule(dynamic, 1)
    for (int64_t share = 0; share < shares; ++share) {
        const int64_t stop = plan.shares[size_t(share + 1)], then = share + omp_get_num_threads();  // if all shares take the same time
        for (int64_t at = plan.shares[size_t(share)]; at < stop; ++at)
            kernel.run(*task(at), at + 1 < stop ? task(at + 1) : then < shares ? task(plan.shares[size_t(then)]) : nullptr);
    }
    if (!merges) return;
#pragma omp for schedule(static)
    for (int64_t at = 0; at < merges; ++at) kernel.merge(plan.blocks[size_t(plan.split[size_t(at / shape.kv_heads)])], at % shape.kv_heads);
}

/// Plans, and does that in a team of its own.
template <class Shared>
void planned(const AttentionShape& shape, const AttentionRuns& runs, Shared shared) {
    static thread_local Plan own;
    Plan& plan = own;  // this thread's, for all
    Planner(shape, runs, plan).make();
#pragma omp parallel num_threads(plan.multiplications < SMALL ? 1 : int(shape.threads))
    shared(plan);
}

}  // namespace
}  // namespace agentrt
