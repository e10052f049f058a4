// AMX's tile registers: products of 16 rows with the 16 outputs of a block, a group of inputs at a time, as TDPBSSD makes them (Intel, Architecture
// Instruction Set Extensions). Their sums are whole numbers, like those of `linear_dots.h`, whose steps and outputs they take as they lie.
// Where TILES_IN_C is defined there is a model of the registers in C, for tests.
#pragma once

#include "linear_dots.h"

#if defined(HAS_TILES)

#include <utility>
#include <vector>

#if !defined(TILES_IN_C)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace agentrt {
namespace {

constexpr int TILE_ROWS = 16, TILE_OUTPUTS = 16;  // of a register
constexpr int TILE_GROUPS = 4;                    // whose products are made in turn: there are registers for so many
constexpr int STEP_BYTES = TILE_OUTPUTS * 4, GROUP_BYTES = GROUP * TILE_OUTPUTS;  // of a block's weights as signed bytes
constexpr size_t CACHE_LINE = 64;

using TileSums = int32_t[TILE_ROWS][TILE_OUTPUTS];

// A block's weights as signed bytes, [step][output][input of a step] for each group; groups are `apart` bytes apart.
struct SignedBlock {
    const int8_t* q;
    int64_t apart;
};

#if defined(TILES_IN_C)

class TileRegisters {
public:
    static bool permitted() { return true; }
    void multiply(const int8_t* x, int64_t stride, SignedBlock w, int groups, TileSums* sums) {
        for (int g = 0; g < groups; ++g)
            for (int r = 0; r < TILE_ROWS; ++r)
                for (int output = 0; output < TILE_OUTPUTS; ++output) {
                    int32_t sum = 0;
                    for (int i = 0; i < GROUP; ++i) sum += x[r * stride + g * GROUP + i] * w.q[g * w.apart + i / 4 * STEP_BYTES + output * 4 + i % 4];
                    sums[g][r][output] = sum;
                }
    }
};

#else

// Configured as long as one of these lives; a thread has one at a time. Registers 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
class TileRegisters {
public:
    // Whether this process may use them: Linux wants to be asked, since a thread's state grows by them.
    static bool permitted() {
        constexpr int ASK_FOR_STATE = 0x1023, TILE_STATE = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        static const bool granted = syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_STATE) == 0;
        return granted;
    }

    TileRegisters() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, zero[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, GROUP, GROUP, STEP_BYTES, STEP_BYTES};
            uint8_t rows[16] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, GROUP / 4, GROUP / 4};
        } shapes;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~TileRegisters() { asm volatile("tilerelease"); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;

    // x: the first row's first group; rows are `stride` bytes apart, groups one after the other. sums: those of TILE_GROUPS groups at most.
    void multiply(const int8_t* x, int64_t stride, SignedBlock w, int groups, TileSums* sums) {
        product<0>(x, stride, w, sums);
        if (groups > 1) product<1>(x, stride, w, sums);
        if (groups > 2) product<2>(x, stride, w, sums);
        if (groups > 3) product<3>(x, stride, w, sums);
    }

private:
    // In assembly, since a compiler's macros take a register's number only as it is written, and say nothing of the memory that is read.
    template <int G>
    static void product(const int8_t* x, int64_t stride, SignedBlock w, TileSums* sums) {
        asm volatile(
            "tilezero %%tmm%c[sum]\n\t"
            "tileloadd (%[x], %[stride], 1), %%tmm%c[left]\n\t"
            "tileloadd (%[w], %[step], 1), %%tmm%c[right]\n\t"
            "tdpbssd %%tmm%c[right], %%tmm%c[left], %%tmm%c[sum]\n\t"
            "tilestored %%tmm%c[sum], (%[to], %[step], 1)"
            :
            : [sum] "i"(G), [left] "i"(4 + G % 2), [right] "i"(6 + G % 2), [x] "r"(x + G * GROUP), [stride] "r"(stride), [w] "r"(w.q + G * w.apart),
              [step] "r"(int64_t(STEP_BYTES)), [to] "r"(sums[G])
            : "memory");
    }
};

#endif

// A group's weights as [step][output][input of a step], less by what is the middle of those without a sign. Steps are known to the compiler.
template <int BITS, int... STEP>
inline void unpack_signed(const uint8_t* lines, int8_t* to, std::integer_sequence<int, STEP...>) {
#if defined(TILES_IN_C)
    for (int i = 0; i < STEP_BYTES; ++i) {
        auto line = [=](int index) { return lines[index * STEP_BYTES + i]; };
        ((to[STEP * STEP_BYTES + i] = int8_t(unpacked<BITS>(line, STEP) - middle_of(BITS))), ...);
    }
#else
    const __m512i middle = _mm512_set1_epi8(middle_of(BITS));
    auto line = [=](int index) { return _mm512_loadu_si512(lines + index * STEP_BYTES); };
    (_mm512_storeu_si512(to + STEP * STEP_BYTES, _mm512_sub_epi8(unpacked<BITS>(line, STEP), middle)), ...);
#endif
}

// Weights of 8 bits are taken where they lie, others unpacked, once for all rows, into memory of the calling thread that is kept for its next call.
template <class Kind>
SignedBlock signed_block(const uint8_t* weights, int groups) {
    const uint8_t* lines = weights + Kind::scales_bytes;
    if constexpr (Kind::bits == 8) {
        return {reinterpret_cast<const int8_t*>(lines), int64_t(Kind::group_bytes)};
    } else {
        static thread_local std::vector<int8_t> kept;
        const size_t bytes = size_t(groups) * GROUP_BYTES + CACHE_LINE;
        if (kept.size() < bytes) kept.resize(bytes);
        int8_t* const q = kept.data() + (CACHE_LINE - reinterpret_cast<uintptr_t>(kept.data()) % CACHE_LINE);
        for (int group = 0; group < groups; ++group, lines += Kind::group_bytes)
            unpack_signed<Kind::bits>(lines, q + group * GROUP_BYTES, std::make_integer_sequence<int, steps_of(Kind::bits)>());
        return {q, GROUP_BYTES};
    }
}

}  // namespace
}  // namespace agentrt

#endif
