// Linear layers with weights of 4, 5, 6 or 8 bits and activations of 8 bits: y = dequantised(x) times dequantised(W), plus bias.
//
// Weights and activations are quantised in groups of 32 along the input. A weight is scale * q + minimum (4 and 5 bits, q
// from 0 on), scale * factor * (q - 32) with a factor of 8 bits for each half of a group (6 bits), or scale * q (8 bits, q from
// -127 to 127); an activation is scale * q with a scale of its own row and group. Below 8 bits a sum of products is that of
// q less its middle value, so that it fits 16 bits (at 5 and 6 bits: in two parts), and at 4 and 5 bits it needs no minimum
// where that is as many times -scale. Products within a group are summed exactly, in integers, times their factors too; groups
// are added in float32, always in the same order. So a row's result is the same, bit for bit, alone and in any company, and
// on any number of threads; and the same numbers held in more bits give the same result.
//
// Outputs are the vector's lanes: 16 or 32 of them make a block, and a group of a block lies in one piece of memory,
//
//     scale[outputs] (float16 or float32), minimum[outputs] (the same; if there are any), factor[2][outputs] (6 bits), q[steps][outputs][inputs of a step]
//
// where steps share bytes if weights have fewer than 8 bits, as `linear_lines.h` says. The inputs of a step, four or two, are
// those that an instruction multiplies and adds; an activation's are broadcast to all lanes.
//
// Rows are taken a few at a time, a tile, so that a weight is unpacked once for them. First the integer sums of some groups
// are made and put aside, then they become floats, are scaled and added: each of the two keeps the processor busy by
// itself, where taking turns group by group they would wait for each other. So many groups that most matrices' fit: beginning
// and ending costs a tile as much as several groups do.
//
// Here are the tiles, who takes which of them, and packing. Vectors are in `linear_lanes.h`, activations in `linear_activations.h`,
// where each weight lies in `linear_lines.h`, the dot products of a group in `linear_dots.h`. The model of all this in Python, which says the same in
// float32, is `reference` in kernels/quantized_linear.py.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear_dots.h"
#include "linear_tiles.h"
#include "team.h"

namespace agentrt {
namespace {

// Rows for a thread from which threads share rows, not outputs: then none waits for another's activations.
constexpr int64_t MANY = 32;

// Bytes that weights are asked for ahead of their use; not a multiple of 4096, at which caches take one address for another.
constexpr size_t AHEAD = 2048;

// Bytes of activations that a thread goes through the weights with: they and a few blocks fit its cache.
#if defined(HAS_TILES)  // which go through them faster than memory gives them, on processors with larger caches
constexpr int64_t CHUNK = 512 * 1024;
#else
constexpr int64_t CHUNK = 112 * 1024;
#endif

// ---- a tile: some rows with the outputs of a block -----------------------------------------------------------------------

// How the packed weights lie.
struct Format {
    int bits;
    bool half, minima;  // whether scales are float16, not float32; whether there are minima
    int outputs() const { return outputs_of(bits); }
    int64_t blocks(int64_t all) const { return (all + outputs() - 1) / outputs(); }
    size_t scales_bytes() const { return outputs() * (half ? 2 : 4) * (minima ? 2 : 1); }
    size_t group_bytes() const { return scales_bytes() + outputs() * bytes_of(bits); }
};

// The same where it is known to the compiler.
template <int BITS, bool HALF, bool MINIMA>
struct Kind {
    using Scale = std::conditional_t<HALF, uint16_t, float>;
    static constexpr bool minima = MINIMA;
    static constexpr int bits = BITS, outputs = outputs_of(BITS);
    static constexpr size_t scales_bytes = outputs * sizeof(Scale) * (MINIMA ? 2 : 1), group_bytes = scales_bytes + outputs * bytes_of(BITS);
};

struct Output {
    float* y;            // [row][output]
    int64_t stride;      // floats from one row to the next
    const float* bias;   // [output], or null
    int64_t outputs;
};

template <class Kind>
inline void ask_ahead(const uint8_t* group) {
    for (size_t line = 0; line < Kind::group_bytes; line += 64) __builtin_prefetch(group + AHEAD + line);
}

// Sums of a group, for neighbouring vectors of outputs, scaled and added.
template <class Kind, class Sum, int ROWS, int OUTPUTS, int PARTS>
inline void add_scaled(const uint8_t* weights, const Rows<Kind::bits>& x, int group, int first, const Sum (&sums)[ROWS][OUTPUTS], Lanes (&totals)[ROWS][PARTS]) {
    for (int part = 0; part < PARTS; ++part) {
        const int at = first + part * WIDTH;
        const auto* scales = reinterpret_cast<const typename Kind::Scale*>(weights + group * Kind::group_bytes) + at;
        const Lanes scale = load(scales);
#pragma GCC unroll 16  // else gcc keeps the totals of sixteen rows in memory
        for (int r = 0; r < ROWS; ++r) {
            const Lanes product = scaled(load(sums[r] + at), x.scale[r * x.stride + group]);
            totals[r][part] = fma(product, scale, totals[r][part]);
        }
        if constexpr (Kind::minima) {
            const Lanes minimum = fma(scale, float(middle_of(Kind::bits)), load(scales + OUTPUTS));  // of q less its middle
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) totals[r][part] = fma(minimum, x.total[r * x.stride + group], totals[r][part]);
        }
    }
}

// Totals of neighbouring vectors of outputs, written where they belong.
template <int ROWS, int PARTS>
inline void write(const Lanes (&totals)[ROWS][PARTS], int first, const Output& to) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        for (int part = 0; part < PARTS; ++part) {
            const int at = first + part * WIDTH;
            store(to.y + r * to.stride + at, to.bias ? plus(totals[r][part], load(to.bias + at)) : totals[r][part]);
        }
    }
}

// Sums of some groups, for neighbouring vectors of outputs, added to what there was of them, if anything, in the order of groups.
template <class Kind, int PARTS, class Sum, int ROWS, int OUTPUTS>
void add_panel(const uint8_t* weights, const Rows<Kind::bits>& x, int groups, int first, const Sum (*sums)[ROWS][OUTPUTS], const float (*before)[OUTPUTS],
               const Output& to) {
    Lanes totals[ROWS][PARTS];
    for (int r = 0; r < ROWS; ++r)
        for (int part = 0; part < PARTS; ++part) totals[r][part] = before ? load(before[r] + first + part * WIDTH) : zeros();
    for (int group = 0; group < groups; ++group) add_scaled<Kind>(weights, x, group, first, sums[group], totals);
    write(totals, first, to);
}

// A row of a tile, those of its outputs from `first` on that there are.
void write_row(const float* sums, int outputs, const Output& out, int64_t row, int64_t first) {
    const int64_t count = std::min<int64_t>(outputs, out.outputs - first);
    const float* bias = out.bias ? out.bias + first : nullptr;
    float* y = out.y + row * out.stride + first;
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(y + i, bias ? plus(load(sums + i), load(bias + i)) : load(sums + i));
    for (; i < count; ++i) y[i] = sums[i] + (bias ? bias[i] : 0.0f);
}

// All groups of a tile, panel after panel; of few rows all outputs at once, else some after the other, as many as there is room for.
// Inlined, since it is measurably slower as a function of its own.
template <class Kind, int ROWS>
__attribute__((always_inline)) inline void add_panels(const uint8_t* weights, Rows<Kind::bits> rows, int all, bool ask, float (*y)[Kind::outputs], const Output& end) {
    constexpr int OUTPUTS = Kind::outputs, VECTORS = OUTPUTS / WIDTH, PARTS = ROWS * VECTORS <= TOTALS ? VECTORS : std::min(VECTORS, 2);
    static_assert(ROWS * PARTS <= TOTALS && VECTORS % PARTS == 0);
    alignas(64) Sum<Kind::bits> sums[PANEL][ROWS][OUTPUTS];
    const Output between{&y[0][0], OUTPUTS, nullptr, OUTPUTS};
    for (int group = 0; group < all; group += PANEL) {
        const int groups = std::min(PANEL, all - group);
        for (int g = 0; g < groups; ++g) {
            const uint8_t* from = weights + g * Kind::group_bytes;
            if (ask) ask_ahead<Kind>(from);
            dots(from + Kind::scales_bytes, rows.from(g), sums[g]);
        }
        for (int part = 0; part < VECTORS; part += PARTS)
            add_panel<Kind, PARTS>(weights, rows, groups, part * WIDTH, sums, group ? y : nullptr, group + groups < all ? between : end);
        weights += groups * Kind::group_bytes;
        rows = rows.from(groups);
    }
}

// The same, group by group, if the registers have room for what has been added so far.
template <class Kind, int ROWS>
void add_groups(const uint8_t* weights, const Rows<Kind::bits>& rows, int all, bool ask, const Output& end) {
    constexpr int OUTPUTS = Kind::outputs;
    alignas(64) Sum<Kind::bits> sums[ROWS][OUTPUTS];
    Lanes totals[ROWS][OUTPUTS / WIDTH];
    for (auto& row : totals)
        for (Lanes& part : row) part = zeros();
    for (int group = 0; group < all; ++group) {
        const uint8_t* from = weights + group * Kind::group_bytes;
        if (ask) ask_ahead<Kind>(from);
        dots(from + Kind::scales_bytes, rows.from(group), sums);
        add_scaled<Kind>(weights, rows, group, 0, sums, totals);
    }
    write(totals, 0, end);
}

#if defined(HAS_TILES)
// The same in tile registers, which leave the vectors' to what has been added so far.
template <class Kind>
void add_products(TileRegisters& registers, const uint8_t* weights, SignedBlock q, Rows<Kind::bits> rows, int all, bool ask, const Output& end) {
    alignas(64) TileSums sums[TILE_GROUPS];
    Lanes totals[TILE_ROWS][1];
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; ++r) totals[r][0] = zeros();
    for (int group = 0; group < all; group += TILE_GROUPS) {
        const int groups = std::min(TILE_GROUPS, all - group);
        registers.multiply(rows.q, int64_t(rows.stride) * GROUP, q, groups, sums);
        for (int g = 0; g < groups; ++g) {
            if (ask) ask_ahead<Kind>(weights + g * Kind::group_bytes);
            add_scaled<Kind>(weights, rows, g, 0, sums[g], totals);
        }
        weights += groups * Kind::group_bytes;
        rows = rows.from(groups);
        q.q += groups * q.apart;
    }
    write(totals, 0, end);
}
#endif

// Some rows with those of a block's outputs that there are. `add(rows, ask, y, end)` adds up all of them, writes them to `end`, and may use `y`.
template <class Kind, int ROWS, class Add>
inline void with_outputs(const Activations& x, int64_t row, const Output& out, int64_t first, Add add) {
    constexpr int OUTPUTS = Kind::outputs;
    alignas(64) float y[ROWS][OUTPUTS];
    const bool whole = first + OUTPUTS <= out.outputs;  // else the block has outputs that there are not
    const Output end = whole ? Output{out.y + row * out.stride + first, out.stride, out.bias ? out.bias + first : nullptr, OUTPUTS}
                             : Output{&y[0][0], OUTPUTS, nullptr, OUTPUTS};
    const size_t at = size_t(row) * x.groups;
    const Rows<Kind::bits> rows{&x.q[at * q_bytes_of(Kind::bits)], &x.start[at * halves_of(Kind::bits)], &x.scale[at], &x.total[at], size_t(x.groups)};
    const bool ask = !row;  // the tiles after the first find a block's weights where it left them
    add(rows, ask, y, end);
    if (!whole)
        for (int r = 0; r < ROWS; ++r) write_row(y[r], OUTPUTS, out, row + r, first);
}

template <class Kind, int ROWS>
void tile(const uint8_t* weights, const Activations& x, int64_t row, const Output& out, int64_t first) {
    with_outputs<Kind, ROWS>(x, row, out, first, [&](const Rows<Kind::bits>& rows, bool ask, auto& y, const Output& end) {
        if constexpr (PANEL == 1)
            add_groups<Kind, ROWS>(weights, rows, x.groups, ask, end);
        else
            add_panels<Kind, ROWS>(weights, rows, x.groups, ask, y, end);
    });
}

template <class Kind, int ROWS = TILE>
void tile_of(int64_t rows, const uint8_t* weights, const Activations& x, int64_t row, const Output& out, int64_t first) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<Kind, ROWS>(weights, x, row, out, first);
        else
            tile_of<Kind, ROWS - 1>(rows, weights, x, row, out, first);
    }
}

// ---- all rows with all outputs -----------------------------------------------------------------------------------------

struct Weights {
    const uint8_t* packed;
    Format format;
    int64_t blocks;
};

#if defined(HAS_TILES)
// As many rows with one block as fill tile registers, which is how many were done. Halves of a group, which have factors, are left to vectors.
template <class Kind>
int64_t multiply_in_registers(const Activations& x, int64_t rows, const uint8_t* weights, const Output& out, int64_t first) {
    int64_t row = 0;
    if constexpr (halves_of(Kind::bits) == 1) {
        if (rows < TILE_ROWS || !TileRegisters::permitted()) return row;
        const SignedBlock q = signed_block<Kind>(weights, x.groups);
        TileRegisters registers;
        for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
            with_outputs<Kind, TILE_ROWS>(x, row, out, first, [&](const Rows<Kind::bits>& some, bool ask, auto&, const Output& end) {
                add_products<Kind>(registers, weights, q, some, x.groups, ask, end);
            });
    }
    return row;
}
#endif

// All rows with one block; those that are left in tiles of nearly the same size.
template <class Kind>
void multiply(const Activations& x, int64_t rows, const Weights& weights, const Output& out, int64_t block) {
    const uint8_t* first = weights.packed + block * x.groups * Kind::group_bytes;
    int64_t row = 0;
#if defined(HAS_TILES)
    row = multiply_in_registers<Kind>(x, rows, first, out, block * Kind::outputs);
#endif
    const int64_t count = (rows - row + TILE - 1) / TILE;
    for (int64_t t = 0; t < count; ++t) {
        const int64_t size = (rows - row + count - t - 1) / (count - t);
        tile_of<Kind>(size, first, x, row, out, block * Kind::outputs);
        row += size;
    }
}

using Multiply = void (*)(const Activations&, int64_t, const Weights&, const Output&, int64_t);
Multiply multiply_of(Format format) {
    if (format.bits == 8) return format.half ? multiply<Kind<8, true, false>> : multiply<Kind<8, false, false>>;
    if (format.bits == 6) return format.half ? multiply<Kind<6, true, false>> : multiply<Kind<6, false, false>>;
    if (format.bits == 5 && format.minima) return format.half ? multiply<Kind<5, true, true>> : multiply<Kind<5, false, true>>;
    if (format.bits == 5) return format.half ? multiply<Kind<5, true, false>> : multiply<Kind<5, false, false>>;
    if (format.minima) return format.half ? multiply<Kind<4, true, true>> : multiply<Kind<4, false, true>>;
    return format.half ? multiply<Kind<4, true, false>> : multiply<Kind<4, false, false>>;
}

// Where the rows are.
struct Input {
    const float* x;
    int64_t stride, inputs;
    int groups() const { return int((inputs + GROUP - 1) / GROUP); }
    const float* row(int64_t index) const { return x + index * stride; }
};

// ---- by the threads of a team (team.h) ------------------------------------------------------------------------------------

// Each thread has some of the rows and all outputs, and goes through the weights with as many rows as its cache holds.
void share_rows(const Input& input, int64_t rows, const Weights& weights, const Output& out, Activations& x) {
    const Multiply multiply = multiply_of(weights.format);
    const int64_t most = std::max<int64_t>(CHUNK / (input.groups() * q_bytes_of(weights.format.bits)) / TILE, 4) * TILE;
    const auto [first, last] = agentrt::own_part(rows);
    const int64_t chunks = (last - first + most - 1) / most;
    for (int64_t chunk = 0, row = first; chunk < chunks; ++chunk) {
        const int64_t count = (last - row + chunks - chunk - 1) / (chunks - chunk);
        x.resize(count, input.groups(), weights.format.bits);
        for (int64_t r = 0; r < count; ++r) quantise_row(input.row(row + r), input.inputs, x, r);
        const Output part{out.y + row * out.stride, out.stride, out.bias, out.outputs};
        for (int64_t block = 0; block < weights.blocks; ++block) multiply(x, count, weights, part, block);
        row += count;
    }
    agentrt::wait_for_all();
}

// Each thread has all rows and some of the outputs. Of few rows each makes its own activations: waiting for each other would take longer.
void share_outputs(const Input& input, int64_t rows, const Weights& weights, const Output& out, Activations& own, Activations& common) {
    const Multiply multiply = multiply_of(weights.format);
    const bool few = rows <= agentrt::FEW;
    Activations& x = few ? own : common;
    if (few) {
        x.resize(rows, input.groups(), weights.format.bits);
        for (int64_t row = 0; row < rows; ++row) quantise_row(input.row(row), input.inputs, x, row);
    } else {
#pragma omp single
        x.resize(rows, input.groups(), weights.format.bits);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) quantise_row(input.row(row), input.inputs, x, row);
    }
    const auto [first, last] = agentrt::own_part(weights.blocks);
    for (int64_t block = first; block < last; ++block) multiply(x, rows, weights, out, block);
    agentrt::wait_for_all();
}

using Put = void (*)(const uint8_t*, uint8_t*, int);
Put put_of(int bits) { return bits == 4 ? put<4> : bits == 5 ? put<5> : bits == 6 ? put<6> : put<8>; }

// A weight as it comes to be packed.
template <class Scale>
struct Unpacked {
    const uint8_t* q;        // [output][group][32]
    const Scale *scale;      // [output][group]
    const Scale *minimum;    // the same, or null
    const uint8_t* factors;  // [output][group][2] at 6 bits
    int64_t outputs, groups;
};

template <class Scale>
void pack_block(Format format, const Unpacked<Scale>& from, int64_t block, uint8_t* to) {
    const int lanes = format.outputs(), together = together_of(format.bits), halves = halves_of(format.bits), inputs = GROUP / halves;
    const Put put = put_of(format.bits);
    for (int64_t group = 0; group < from.groups; ++group, to += format.group_bytes()) {
        std::memset(to, 0, format.group_bytes());
        auto* scales = reinterpret_cast<Scale*>(to);
        uint8_t* const weights = to + format.scales_bytes();
        for (int lane = 0; lane < lanes && block * lanes + lane < from.outputs; ++lane) {
            const int64_t at = (block * lanes + lane) * from.groups + group;
            scales[lane] = from.scale[at];
            if (format.minima) scales[lanes + lane] = from.minimum[at];
            for (int half = 0; half < halves; ++half) {
                if (format.bits == 6) weights[half * lanes + lane] = from.factors[at * 2 + half];
                put(from.q + at * GROUP + half * inputs, weights + lines_at(format.bits, lanes, half) + lane * together, lanes * together);
            }
        }
    }
}

}  // namespace
}  // namespace agentrt

using namespace agentrt;

extern "C" {

// The instructions that this library was compiled for, and may use.
const char* linear_isa() {
#if defined(HAS_TILES)
    if (!TileRegisters::permitted()) return ISA_WITHOUT_TILES;
#endif
    return ISA;
}

// Bytes of a packed weight. minima: whether it has them; 4 and 5 bits without: minima are -8 and -16 times the scales.
int64_t linear_packed_bytes(int64_t outputs, int64_t groups, int bits, int half, int minima) {
    const Format format{bits, half != 0, minima != 0};
    return format.blocks(outputs) * groups * int64_t(format.group_bytes());
}

// q: a byte for each weight, [output][group][32]. scale, minimum: [output][group], float16 if half, else float32; minimum may be null. factors: at 6 bits
// [output][group][2], from -128 to 127.
void linear_pack(const uint8_t* q, const void* scale, const void* minimum, const uint8_t* factors, int64_t outputs, int64_t groups, int bits, int half,
                 uint8_t* packed, int threads) {
    const Format format{bits, half != 0, minimum != nullptr};
    const int64_t blocks = format.blocks(outputs);
    const int64_t size = groups * int64_t(format.group_bytes());
    auto all = [&](const auto* scales, const auto* minima) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t block = 0; block < blocks; ++block)
            pack_block(format, Unpacked<std::decay_t<decltype(*scales)>>{q, scales, minima, factors, outputs, groups}, block, packed + block * size);
    };
    if (half)
        all(static_cast<const uint16_t*>(scale), static_cast<const uint16_t*>(minimum));
    else
        all(static_cast<const float*>(scale), static_cast<const float*>(minimum));
}

// Memory of the calling thread that a team may use together; there as long as the thread is.
void* linear_memory() {
    static thread_local Activations common;
    return &common;
}

// What the calling thread of a team will read of a weight, where there are few rows.
void linear_coming(int64_t inputs, const uint8_t* packed, int bits, int half, int minima, int64_t outputs, agentrt::Coming* coming) {
    const Format format{bits, half != 0, minima != 0};
    const size_t block = size_t((inputs + GROUP - 1) / GROUP) * format.group_bytes();
    const auto [first, last] = agentrt::own_part(format.blocks(outputs));
    *coming = {reinterpret_cast<const char*>(packed + first * block), reinterpret_cast<const char*>(packed + last * block)};
}

// As linear_run, shared. x may be another place for each thread if there are at most FEW rows, with the same numbers in it. memory: `linear_memory` of
// one of the threads.
void linear_shared(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half, int minima,
                   const float* bias, float* y, int64_t y_stride, int64_t outputs, void* memory) {
    static thread_local Activations own;
    const Input input{x, x_stride, inputs};
    const Format format{bits, half != 0, minima != 0};
    const Weights weights{packed, format, format.blocks(outputs)};
    const Output out{y, y_stride, bias, outputs};
    if (rows >= MANY * omp_get_num_threads())
        share_rows(input, rows, weights, out, own);
    else
        share_outputs(input, rows, weights, out, own, *static_cast<Activations*>(memory));
}

// x: [rows][inputs], rows x_stride floats apart. y: [rows][outputs], rows y_stride floats apart. bias: [outputs] or null.
void linear_run(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half, int minima,
                const float* bias, float* y, int64_t y_stride, int64_t outputs, int threads) {
    void* const memory = linear_memory();
#pragma omp parallel num_threads(threads)
    linear_shared(x, x_stride, rows, inputs, packed, bits, half, minima, bias, y, y_stride, outputs, memory);
}

}  // extern "C"
