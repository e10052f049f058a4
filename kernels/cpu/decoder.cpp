// A decoder from token ids to what its last norm gives, in one call: what is done in which order, and how long each kind took.
//
// The work itself is the other kernels': their functions are handed in, so this file has no arithmetic, and a step computed
// here is, bit for bit, what those functions give when each is called by itself. What is saved is a few hundred calls from
// Python, which at one row take as long as the matrices.
//
// A step is done by one team of threads (team.h), each of which goes through all of it: matrices and attention are shared kernels, and what is
// done row by row each thread does for some of the rows. Of FEW rows it does all, in memory of its own, and waits for nobody:
//
//     each: norm -> shared: q, k, v -> shared: attention -> shared: output -> each: add, norm -> shared: gate, up -> each: gate -> shared: down

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "team.h"

using agentrt::Coming;

extern "C" {

/// Functions of linear.cpp, of attention.cpp or attention_int.cpp, and of fused.cpp, which say what they take.
struct DecoderKernels {
    void (*linear)(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half, int minima,
                   const float* bias, float* y, int64_t y_stride, int64_t outputs, void* memory);
    void* (*linear_memory)();
    void (*linear_coming)(int64_t inputs, const uint8_t* packed, int bits, int half, int minima, int64_t outputs, Coming* coming);
    void (*attention)(const void* shape, const void* runs, void* plan, const void* q, const void* k, const void* v, const void* cos, const void* sin,
                      void* keys, void* values, void* out, Coming* coming);
    void (*norm)(void* rows, const void* added, const void* weight, void* out, int64_t count, int64_t width, int64_t stride, int64_t added_stride,
                 float eps, int bfloat16, int threads);
    void (*gate)(const void* fused, void* out, int64_t count, int64_t width, int64_t stride, int kind, int bfloat16, int threads);
};

/// A matrix, or some of its outputs: a matrix may be held in parts of different formats.
struct DecoderMatrix {
    const uint8_t* packed;
    const float* bias;
    int64_t inputs, outputs, bits, half, minima;
};

struct DecoderLayer {
    const float *before_attention, *before_mlp;  // weights of norms
    const AttentionShape* shape;
    void *keys, *values;
    int64_t local;              // which angles turn it
    int64_t parts[4];           // of q, k and v together; of the output; of gate and up together; of down
    const DecoderMatrix* part;  // those parts, one after the other
};

struct DecoderShape {
    int64_t layers, width, heads, kv_heads, head_dim, mlp_width, vocabulary;
    int64_t activation, threads;  // activation as in agentrt_gate
    double eps, embedding_scale;
    const float* embedding;  // [vocabulary, width]
    const float* norm;       // weight of the last norm
    const DecoderLayer* layer;
};

/// What a step is about.
struct DecoderTokens {
    int64_t count;
    const int64_t *ids, *positions;  // [count]
    const float* const* angles;      // cosines and sines for all layers, then for local ones: each [reach, head_dim], by position
    int64_t reach;
};

/// What is asked of the last layer, if it is not all.
struct DecoderWanted {
    const AttentionRuns* runs;  // all tokens are written, and no more attend than has to
    const int64_t* rows;  // [count]: tokens, in any order; fewer than there are
    int64_t count;
};
}

namespace {

using namespace agentrt;

enum Kind { LINEARS, ATTENTION, ROWS };

/// Adds what passes to one kind of work after the other; without a place for it, does nothing.
class Clock {
public:
    explicit Clock(double* seconds) : seconds_(seconds), since_(now()) {}
    void took(Kind kind) {
        if (!seconds_) return;
        const auto at = now();
        seconds_[kind] += std::chrono::duration<double>(at - since_).count();
        since_ = at;
    }

private:
    static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
    double* seconds_;
    std::chrono::steady_clock::time_point since_;
};

/// The plans of a step's attention, of which layers need few; kept, since fresh memory costs page faults.
class Plans {
public:
    void begin() { count_ = 0; }

    Plan& of(const AttentionShape* shape, const AttentionRuns* runs) {
        for (size_t i = 0; i < count_; ++i)
            if (plans_[i].shape == shape && plans_[i].runs == runs) return plans_[i].plan;
        if (count_ == plans_.size()) plans_.emplace_back();
        Planned& made = plans_[count_++];
        made.shape = shape, made.runs = runs;
        Planner(*shape, *runs, made.plan).make();
        return made.plan;
    }

private:
    struct Planned {
        const AttentionShape* shape;
        const AttentionRuns* runs;
        Plan plan;
    };
    std::vector<Planned> plans_;
    size_t count_ = 0;
};

/// What a step is asked, as all its threads see it.
struct Asked {
    const DecoderKernels& kernels;
    const DecoderShape& shape;
    const DecoderTokens& tokens;
    const AttentionRuns* runs;
    const DecoderWanted* wanted;
    float *memory, *out;
    double* seconds;
    Plans& plans;  // made before the team is
    void* linear_memory;

    bool few() const { return tokens.count <= FEW; }
    bool is_last(int64_t layer) const { return wanted && layer + 1 == shape.layers; }
    const AttentionRuns* runs_of(int64_t layer) const { return is_last(layer) ? wanted->runs : runs; }
};

constexpr int64_t ANGLES = 4;  // cosines and sines, twice

/// Floats of a row: in what matrices and attention give, and in what is done row by row.
int64_t shared_floats(const DecoderShape& shape) { return shape.width + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 2 * shape.mlp_width; }
int64_t own_floats(const DecoderShape& shape) { return 2 * shape.width + ANGLES * shape.head_dim + shape.mlp_width; }

/// A step as one of its threads does it.
class Step {
public:
    explicit Step(const Asked& asked)
        : asked_(asked), kernels_(asked.kernels), shape_(asked.shape), rows_(asked.tokens.count), qkv_width_((shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim),
          first_thread_(omp_get_thread_num() == 0), clock_(first_thread_ ? asked.seconds : nullptr) {
        float* place = asked.memory;
        auto take = [&](int64_t width) { return std::exchange(place, place + rows_ * width); };
        changed_ = take(shape_.width);
        qkv_ = take(qkv_width_);
        attended_ = take(shape_.heads * shape_.head_dim);
        gate_up_ = take(2 * shape_.mlp_width);
        if (asked.few()) place += omp_get_thread_num() * rows_ * own_floats(shape_);
        hidden_ = take(shape_.width);
        normed_ = take(shape_.width);
        gated_ = take(shape_.mlp_width);
        for (float*& angles : angles_) angles = take(shape_.head_dim);
    }

    void run() {
        embed();
        const float* added = nullptr;  // what the layer before adds; added where it is normed next
        for (int64_t i = 0; i < shape_.layers; ++i) {
            const DecoderLayer& layer = shape_.layer[i];
            const DecoderMatrix* part = layer.part;
            norm(added, layer.before_attention, normed_);
            part = multiply(part, layer.parts[0], normed_, qkv_, qkv_width_);
            attend(layer, asked_.runs_of(i), *part);
            if (asked_.is_last(i)) keep(*asked_.wanted);
            if (!rows_) return;
            part = multiply(part, layer.parts[1], attended_, changed_, shape_.width);
            norm(changed_, layer.before_mlp, normed_);
            part = multiply(part, layer.parts[2], normed_, gate_up_, 2 * shape_.mlp_width);
            gate();
            multiply(part, layer.parts[3], gated_, changed_, shape_.width);
            added = changed_;
        }
        if (!asked_.few() || first_thread_) norm(added, shape_.norm, asked_.out);
    }

private:
    /// What is done row by row: by every thread for all rows, or by each for some.
    template <class Work>
    void by_rows(Work work) {
        if (asked_.few()) {
            work(Part{0, rows_});
        } else {
            work(own_part(rows_));
            wait_for_all();
        }
        clock_.took(ROWS);
    }

    /// Each token's embedding, and the angles of its position.
    void embed() {
        const DecoderTokens& tokens = asked_.tokens;
        const float scale = float(shape_.embedding_scale);
        by_rows([&](Part part) {
            for (int64_t row = part.first; row < part.last; ++row) {
                const float* from = shape_.embedding + tokens.ids[row] * shape_.width;
                float* to = hidden_ + row * shape_.width;
                for (int64_t i = 0; i < shape_.width; ++i) to[i] = from[i] * scale;
                for (int64_t i = 0; i < ANGLES; ++i)
                    std::copy_n(tokens.angles[i] + tokens.positions[row] * shape_.head_dim, shape_.head_dim, angles_[i] + row * shape_.head_dim);
            }
        });
    }

    /// From here on there are only the wanted rows. They fit where more rows were that nobody needs any more.
    void keep(const DecoderWanted& wanted) {
        auto gather = [&](float*& rows, int64_t width, float*& unused, Part part) {
            for (int64_t i = part.first; i < part.last; ++i) std::copy_n(rows + wanted.rows[i] * width, width, unused + i * width);
            std::swap(rows, unused);
        };
        rows_ = wanted.count;
        gather(attended_, shape_.heads * shape_.head_dim, qkv_, own_part(rows_));
        by_rows([&](Part part) { gather(hidden_, shape_.width, normed_, part); });
        if (asked_.few()) wait_for_all();
    }

    void norm(const float* added, const float* weight, float* out) {
        by_rows([&](Part part) {
            const int64_t at = part.first * shape_.width;
            kernels_.norm(hidden_ + at, added ? added + at : nullptr, weight, out + at, part.last - part.first, shape_.width, shape_.width, shape_.width,
                          float(shape_.eps), 0, 1);
        });
    }

    void gate() {
        by_rows([&](Part part) {
            const int64_t width = shape_.mlp_width;
            kernels_.gate(gate_up_ + part.first * 2 * width, gated_ + part.first * width, part.last - part.first, width, 2 * width, int(shape_.activation), 0, 1);
        });
    }

    const DecoderMatrix* multiply(const DecoderMatrix* part, int64_t parts, const float* x, float* y, int64_t width) {
        for (int64_t i = 0; i < parts; y += part->outputs, ++i, ++part)
            kernels_.linear(x, part->inputs, rows_, part->inputs, part->packed, int(part->bits), int(part->half), int(part->minima), part->bias,
                            y, width, part->outputs, asked_.linear_memory);
        clock_.took(LINEARS);
        return part;
    }

    /// next: what is multiplied by then. Few rows wait for its memory there and compute here, so it is asked for here.
    void attend(const DecoderLayer& layer, const AttentionRuns* runs, const DecoderMatrix& next) {
        Coming coming;
        if (asked_.few())
            kernels_.linear_coming(next.inputs, next.packed, int(next.bits), int(next.half), int(next.minima), next.outputs, &coming);
        const float *k = qkv_ + shape_.heads * shape_.head_dim, *v = k + shape_.kv_heads * shape_.head_dim;
        float* const* angles = angles_ + 2 * layer.local;
        kernels_.attention(layer.shape, runs, &asked_.plans.of(layer.shape, runs), qkv_, k, v, angles[0], angles[1], layer.keys, layer.values, attended_,
                           asked_.few() ? &coming : nullptr);
        clock_.took(ATTENTION);
    }

    const Asked& asked_;
    const DecoderKernels& kernels_;
    const DecoderShape& shape_;
    int64_t rows_;
    const int64_t qkv_width_;
    const bool first_thread_;
    float *changed_, *qkv_, *attended_, *gate_up_;                 // of the team
    float *hidden_, *normed_, *gated_, *angles_[ANGLES];  // of this thread if rows are few, else of the team too
    Clock clock_;
};

}  // namespace

extern "C" {

/// Floats that a step of so many tokens needs beside its tensors.
int64_t agentrt_decoder_memory(const DecoderShape* shape, int64_t tokens) {
    return tokens * (shared_floats(*shape) + own_floats(*shape) * (tokens <= FEW ? shape->threads : 1));
}

/// Runs all layers and the last norm; answers -1, or, before anything is done, which token has an id or a position that there is not.
///
/// wanted: null if all rows are. memory: of `agentrt_decoder_memory` floats. out [wanted or tokens, width]. seconds [3]: what linears, attention, and
/// what is done row by row took is added to them, as the first thread sees it.
int64_t agentrt_decoder(const DecoderKernels* kernels, const DecoderShape* shape, const DecoderTokens* tokens, const AttentionRuns* runs,
                        const DecoderWanted* wanted, float* memory, float* out, double* seconds) {
    for (int64_t i = 0; i < tokens->count; ++i) {
        const bool known = 0 <= tokens->ids[i] && tokens->ids[i] < shape->vocabulary;
        if (!known || tokens->positions[i] < 0 || tokens->positions[i] >= tokens->reach) return i;
    }
    static thread_local Plans plans;
    plans.begin();
    const Asked asked{*kernels, *shape, *tokens, runs, wanted, memory, out, seconds, plans, kernels->linear_memory()};
    for (int64_t i = 0; i < shape->layers; ++i) plans.of(shape->layer[i].shape, asked.runs_of(i));
#pragma omp parallel num_threads(int(shape->threads))
    Step(asked).run();
    return -1;
}
}
