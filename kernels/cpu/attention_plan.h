// Who reads what in attention: the runs of a step, divided into blocks of rows that read segments together, and tasks for the threads.
// No arithmetic. Invariant: where a segment begins depends on the position alone, so what a row is put together with decides who computes, not what.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

extern "C" {

/// What a layer asks, and how its tensors lie. Strides are in elements, from token to token.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim;
    int64_t q_stride, k_stride, v_stride;
    int64_t q_bfloat16;               // else float32
    int64_t kv_kind;                  // 0: float32, 1: bfloat16, 2: float16; whole numbers have a kernel of their own
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

namespace agentrt {
namespace {

constexpr int SEGMENT = 64;       // tokens that are read together
constexpr int LONG = 16;          // tokens of a run from which on its KV heads are worked through apart
constexpr int TOGETHER = 32;      // tokens that may read a segment together, all heads of them
constexpr int APART = 64;         // the same, one KV head of them
constexpr int64_t TILE = 24576;   // floats of q that such tokens may have: as much again for their sums, and all fits the cache
constexpr int64_t SMALL = 60000;  // multiplications below which a second thread costs more than it saves

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

/// Segments [first, last) of a block, and some KV heads of them; `row` is -1 for segments that all rows read, else whose.
struct Task {
    int64_t block, row, first, last, kv_first, kv_count;
};

struct Plan {
    std::vector<Row> rows;
    std::vector<Block> blocks;
    std::vector<Task> tasks;
    std::vector<int64_t> shares;  // the first task of each share, which one thread does, and behind them how many tasks there are
    std::vector<int64_t> split;   // blocks that several tasks share
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
        plan_.shares.clear();
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

    /// Blocks become tasks, each a share. Where they are too few for the threads there are as many shares as threads, of about the same work, and what
    /// lies across the border of two is cut there: between segments, or between a segment's KV heads.
    void divide() {
        int64_t tasks = 0;
        for (Block& block : plan_.blocks) {
            for (int64_t i = block.begin; i < block.begin + block.count; ++i)
                block.last = std::max(block.last, segments(plan_.rows[size_t(i)].stop));
            tasks += block.apart ? shape_.kv_heads : 1;
        }
        const bool few = shape_.threads > 1 && plan_.multiplications > SMALL && tasks < 4 * shape_.threads;
        auto is_cut = [&](const Block& block) { return few && !block.apart && block.count * (block.last - block.first) <= 8192; };
        work_ = done_ = room_ = 0;
        for (const Block& block : plan_.blocks) work_ += is_cut(block) ? work_of(block) : 0;
        for (int64_t at = 0; at < int64_t(plan_.blocks.size()); ++at) {
            const Block& block = plan_.blocks[size_t(at)];
            if (is_cut(block))
                cut(at);
            else if (block.apart)
                for (int64_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) add({at, -1, block.first, block.last, kv_head, 1}, ALONE);
            else
                add({at, -1, block.first, block.last, 0, shape_.kv_heads}, ALONE);
        }
        plan_.shares.push_back(int64_t(plan_.tasks.size()));
        if (int64_t(plan_.partial.size()) < room_) plan_.partial.resize(size_t(room_));
    }

    /// Calls with whose segment it is, which, and how much work: keys times rows.
    template <class Visit>
    void each_segment(const Block& block, Visit visit) const {
        auto keys = [](int64_t segment, const Row& row) { return std::min<int64_t>(SEGMENT, row.stop - segment * SEGMENT); };
        const Row* rows = plan_.rows.data() + block.begin;
        for (int64_t segment = block.first; segment < block.common; ++segment) visit(-1, segment, block.count * keys(segment, rows[block.count - 1]));
        for (int64_t row = 0; row < block.count; ++row)
            for (int64_t segment = block.common; segment < segments(rows[row].stop); ++segment) visit(row, segment, keys(segment, rows[row]));
    }

    int64_t work_of(const Block& block) const {
        int64_t work = 0;
        each_segment(block, [&](int64_t, int64_t, int64_t some) { work += some; });
        return work;
    }

    int64_t share_of(int64_t work) const { return work * shape_.threads / work_; }

    void cut(int64_t at) {
        Block& block = plan_.blocks[size_t(at)];
        const int64_t work = work_of(block), share = share_of(done_);
        if (share == share_of(done_ + work - 1)) {
            add({at, -1, block.first, block.last, 0, shape_.kv_heads}, share);
            done_ += work;
            return;
        }
        block.partial = room_;
        room_ += block.count * (block.last - block.first) * (width_ + 2 * shape_.heads);
        plan_.split.push_back(at);
        each_segment(block, [&](int64_t row, int64_t segment, int64_t some) {
            auto of = [&](int64_t kv_head) { return share_of(done_ + some * (2 * kv_head + 1) / (2 * shape_.kv_heads)); };  // by its middle
            for (int64_t first = 0, last; first < shape_.kv_heads; first = last) {
                for (last = first + 1; last < shape_.kv_heads && of(last) == of(first);) ++last;
                add({at, row, segment, segment + 1, first, last - first}, of(first));
            }
            done_ += some;
        });
    }

    /// A task of a share; segments of one that follow each other become one task.
    void add(const Task& task, int64_t share) {
        if (share == ALONE || share != share_) plan_.shares.push_back(int64_t(plan_.tasks.size()));
        else if (Task& last = plan_.tasks.back(); last.block == task.block && last.row == task.row && last.last == task.first &&
                                                  last.kv_count == shape_.kv_heads && task.kv_count == shape_.kv_heads) {
            last.last = task.last;
            return;
        }
        share_ = share;
        plan_.tasks.push_back(task);
    }

    static constexpr int64_t ALONE = -1;
    const AttentionShape& shape_;
    const AttentionRuns& runs_;
    Plan& plan_;
    int64_t width_, most_;
    int64_t work_ = 0, done_ = 0, room_ = 0;  // of blocks that may be cut: all of it, what comes before the one at hand; floats of `partial`
    int64_t share_ = ALONE;                   // of the last task
    std::vector<bool> grouped_;
};

}  // namespace
}  // namespace agentrt
