// What is done to logits before a token is chosen, in one pass over them: what may not be chosen becomes minus infinity, the
// largest logit of each block of 64 is written beside them, the likeliest token of a row is told, and so is a row that the model
// spoilt (NaN, infinities). And what a token is drawn by, where none is left out: the weight of each block. Each row by itself;
// nothing depends on how many threads there are.

#include <cstdint>

#include "simd.h"

namespace {

using namespace agentrt;

constexpr int BLOCK = 64;
constexpr int64_t SMALL = 40000;  // logits below which a second thread costs more than it saves
constexpr float LIGHTEST = -87.0f;  // below this, exp gives what float32 has no normal number for
constexpr int64_t NONE = -1, SPOILT = -2;  // in place of the likeliest token: none may be chosen; the row is not finite
constexpr int32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

/// The bit of each lane.
inline Ints lane_bits() {
    Ints bits;
    for (int lane = 0; lane < LANES; ++lane) bits[lane] = 1 << lane;
    return bits;
}

/// One block: keeps the logits whose bit in `allowed` is set, returns the largest of them, and joins all magnitudes to `worst`.
inline float block_top(float* logits, uint64_t allowed, Ints& worst) {
    const Floats none = all(-__builtin_inff());
    const Ints bits = lane_bits();
    Floats top = none;
    for (int i = 0; i < BLOCK; i += LANES) {
        const Floats logit = load(logits + i);
        const Ints magnitude = (Ints)logit & MAGNITUDE;
        worst = (magnitude > worst) ? magnitude : worst;
        if (~allowed) {
            const Ints own = bits & int32_t(allowed >> i);
            const Floats kept = (own != 0) ? logit : none;
            store(logits + i, kept);
            top = larger(kept, top);
        } else {
            top = larger(logit, top);
        }
    }
    return largest(top);
}

/// A whole row: its likeliest token, of equal ones the first, or why there is none.
int64_t row_tops(float* logits, const uint32_t* valid, const uint32_t* mask, float* tops, int64_t blocks) {
    Ints worst = {};
    float peak = -__builtin_inff();
    int64_t best = NONE;
    for (int64_t block = 0; block < blocks; ++block) {
        uint64_t allowed = valid[2 * block] | uint64_t(valid[2 * block + 1]) << 32;
        if (mask) allowed &= mask[2 * block] | uint64_t(mask[2 * block + 1]) << 32;
        const float top = tops[block] = block_top(logits + block * BLOCK, allowed, worst);
        if (top > peak) peak = top, best = block;
    }
    for (int lane = 0; lane < LANES; ++lane)
        if (worst[lane] >= INFINITE) return SPOILT;
    if (best == NONE) return NONE;
    int64_t at = best * BLOCK;
    while (logits[at] != peak) ++at;
    return at;
}

/// exp((logit - peak) / temperature), summed over a block.
inline float block_weight(const float* logits, float peak, float temperature) {
    Floats weight = all(0.0f);
    for (int i = 0; i < BLOCK; i += LANES) weight += exponential((load(logits + i) - peak) / temperature);
    return sum(weight);
}

}  // namespace

extern "C" {

/// Forbids what `valid` and a row's mask do not allow, in place, and gives each block's largest logit.
///
/// logits [rows, 64 blocks] and tops [rows, blocks], float32, dense; valid [2 blocks]; masks [any, 2 blocks], bit i of word w
/// for token 32 w + i; mask_of_row [rows]: which mask is a row's, -1 for none; null if no row has one; likeliest [rows]: the token with
/// the largest logit, of equal ones the first, -1 if none may be chosen, -2 if the row's logits were not finite.
void agentrt_block_tops(float* logits, const uint32_t* valid, const uint32_t* masks, const int32_t* mask_of_row, float* tops, int64_t* likeliest,
                        int64_t rows, int64_t blocks, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(rows > 1 && rows * blocks * BLOCK > SMALL ? threads : 1)
    for (int64_t row = 0; row < rows; ++row) {
        const uint32_t* mask = !mask_of_row || mask_of_row[row] < 0 ? nullptr : masks + mask_of_row[row] * 2 * blocks;
        likeliest[row] = row_tops(logits + row * blocks * BLOCK, valid, mask, tops + row * blocks, blocks);
    }
}

/// exp((logit - peak) / temperature) summed in each block of the rows at `index` [n]; a block in which all weigh too little for
/// float32's normal numbers counts as nothing, and is not read.
///
/// logits [any, 64 blocks] and tops [any, blocks] as above; peaks and temperatures [n]; weights [n, blocks].
void agentrt_block_weights(const float* logits, const float* tops, const int64_t* index, const float* peaks, const float* temperatures, float* weights,
                           int64_t n, int64_t blocks, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(n > 1 && n * blocks * BLOCK > SMALL ? threads : 1)
    for (int64_t place = 0; place < n; ++place) {
        const int64_t row = index[place];
        for (int64_t block = 0; block < blocks; ++block) {
            const bool some = (tops[row * blocks + block] - peaks[place]) / temperatures[place] > LIGHTEST;
            const float* from = logits + (row * blocks + block) * BLOCK;
            weights[place * blocks + block] = some ? block_weight(from, peaks[place], temperatures[place]) : 0.0f;
        }
    }
}
}
