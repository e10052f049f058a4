// What is done to logits before a token is chosen, in one pass over them: what may not be chosen becomes minus infinity, the
// largest logit of each block of 64 is written beside them, and a row that the model spoilt (NaN, infinities) is told. Each
// row by itself; nothing depends on how many threads there are.

#include <cstdint>

#include "simd.h"

namespace {

using namespace agentrt;

constexpr int BLOCK = 64;
constexpr int64_t SMALL = 40000;  // logits below which a second thread costs more than it saves
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

/// A whole row; whether all of it is finite.
bool row_tops(float* logits, const uint32_t* valid, const uint32_t* mask, float* tops, int64_t blocks) {
    Ints worst = {};
    for (int64_t block = 0; block < blocks; ++block) {
        uint64_t allowed = valid[2 * block] | uint64_t(valid[2 * block + 1]) << 32;
        if (mask) allowed &= mask[2 * block] | uint64_t(mask[2 * block + 1]) << 32;
        tops[block] = block_top(logits + block * BLOCK, allowed, worst);
    }
    int32_t largest_magnitude = 0;
    for (int lane = 0; lane < LANES; ++lane) largest_magnitude = worst[lane] > largest_magnitude ? worst[lane] : largest_magnitude;
    return largest_magnitude < INFINITE;
}

}  // namespace

extern "C" {

/// Forbids what `valid` and a row's mask do not allow, in place, and gives each block's largest logit.
///
/// logits [rows, 64 blocks] and tops [rows, blocks], float32, dense; valid [2 blocks]; masks [any, 2 blocks], bit i of word w
/// for token 32 w + i; mask_of_row [rows]: which mask is a row's, -1 for none; finite [rows]: whether the row's logits were.
void agentrt_block_tops(float* logits, const uint32_t* valid, const uint32_t* masks, const int32_t* mask_of_row, float* tops, uint8_t* finite,
                        int64_t rows, int64_t blocks, int threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(rows > 1 && rows * blocks * BLOCK > SMALL ? threads : 1)
    for (int64_t row = 0; row < rows; ++row) {
        const uint32_t* mask = mask_of_row[row] < 0 ? nullptr : masks + mask_of_row[row] * 2 * blocks;
        finite[row] = row_tops(logits + row * blocks * BLOCK, valid, mask, tops + row * blocks, blocks);
    }
}
}
