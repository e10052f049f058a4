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

}  // namespace
}  // namespace agentrt
