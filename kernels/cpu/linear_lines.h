// How the weights of a group lie in bytes, which packing and the dot products both are told here.
//
// A group is so many steps, a step a vector of weights: those of a block's outputs with the inputs that an instruction takes together. Packed, a group
// is lines, which are as long as a step but have 8 bits for each weight. At 4 bits the first half of the steps are the low halves of the lines' bytes, the
// second half the high ones. At 5 bits five lines hold eight steps: five in their low bits, the others piece by piece in the three bits above. At 6 bits
// three lines hold the four steps of half a group, and before the lines there are the factors of the halves, a byte for each output.
#pragma once

#include <cstdint>

#include "linear_lanes.h"

namespace agentrt {
namespace {

// So many bits of a weight, from bit `to` on, lie in a line's byte from bit `from` on.
struct Piece {
    int line, from, to, count;
};

constexpr int PIECES = 3;  // of a weight, at most
constexpr Piece FIVE[8][PIECES] = {
    {{0, 0, 0, 5}}, {{1, 0, 0, 5}}, {{2, 0, 0, 5}}, {{3, 0, 0, 5}}, {{4, 0, 0, 5}},
    {{0, 5, 2, 3}, {1, 6, 0, 2}}, {{2, 5, 2, 3}, {3, 6, 0, 2}}, {{4, 5, 2, 3}, {1, 5, 0, 1}, {3, 5, 1, 1}},
};
constexpr Piece SIX[4][PIECES] = {{{0, 0, 0, 6}}, {{1, 0, 0, 6}}, {{2, 0, 0, 6}}, {{0, 6, 0, 2}, {1, 6, 2, 2}, {2, 6, 4, 2}}};

constexpr Piece piece_of(int bits, int step, int index) {
    if (bits == 5) return FIVE[step][index];
    if (bits == 6) return SIX[step][index];
    if (index) return {};
    const int half = steps_of(bits) / 2;
    return bits == 4 ? Piece{step % half, step < half ? 0 : 4, 0, 4} : Piece{step, 0, 0, 8};
}

// Bytes that an output's weights of a group take.
constexpr int bytes_of(int bits) { return GROUP * bits / 8 + (bits == 6 ? halves_of(bits) : 0); }

// Where the lines of a half begin in a group of so many outputs; before the first one there are the factors, if any.
constexpr int lines_at(int bits, int outputs, int half) { return (bits == 6 ? 2 * outputs : 0) + half * (GROUP / halves_of(bits) * bits / 8 * outputs); }

// A step's weights, whose lines are line(0), line(1) and so on.
template <int BITS, class Line>
inline auto unpacked(Line line, int step) {
    auto taken = [&](int index) {
        const Piece piece = piece_of(BITS, step, index);
        return bits_of(line(piece.line), piece.from - piece.to, ((1 << piece.count) - 1) << piece.to);
    };
    auto weights = taken(0);
    for (int index = 1; index < PIECES; ++index)
        if (piece_of(BITS, step, index).count) weights |= taken(index);
    return weights;
}

// Puts an output's weights, as many as are summed at once, into lines, so many bytes apart, which are 0; `to` is where the output begins in the first.
template <int BITS>
void put(const uint8_t* weights, uint8_t* to, int apart) {
    constexpr int TOGETHER = together_of(BITS), COUNT = GROUP / halves_of(BITS);
#pragma GCC unroll 32
    for (int i = 0; i < COUNT; ++i) {
        for (int index = 0; index < PIECES; ++index) {
            const Piece piece = piece_of(BITS, i / TOGETHER, index);
            if (piece.count) to[piece.line * apart + i % TOGETHER] |= uint8_t((weights[i] >> piece.to & ((1 << piece.count) - 1)) << piece.from);
        }
    }
}

}  // namespace
}  // namespace agentrt
