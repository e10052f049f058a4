// A decoder from token ids to what its last norm gives, in one call: what is done in which order, and how long each kind took.
//
// The work itself is the other kernels': their functions are handed in, so this file has no arithmetic, and a step computed
// here is, bit for bit, what those functions give when each is called by itself. What is saved is a few hundred calls from
// Python, which at one row take as long as the matrices.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <utility>

extern "C" {

/// Functions of linear.cpp, of attention.cpp or attention_int.cpp, and of fused.cpp, which say what they take.
struct DecoderKernels {
    void (*linear)(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, const uint8_t* packed, int bits, int half, int minima,
                   const float* bias, float* y, int64_t y_stride, int64_t outputs, int threads);
    void (*attention)(const void* shape, const void* runs, const void* q, const void* k, const void* v, const void* cos, const void* sin,
                      void* keys, void* values, void* out);
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
    const void* shape;                           // an AttentionShape
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
    const void* runs;     // an AttentionRuns: all tokens are written, and no more attend than has to
    const int64_t* rows;  // [count]: tokens, in any order; fewer than there are
    int64_t count;
};
}

namespace {

enum Kind { LINEARS, ATTENTION, ROWS };

/// Adds what passes to one kind of work after the other.
class Clock {
public:
    explicit Clock(double* seconds) : seconds_(seconds), since_(now()) {}
    void took(Kind kind) {
        const auto at = now();
        seconds_[kind] += std::chrono::duration<double>(at - since_).count();
        since_ = at;
    }

private:
    static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
    double* seconds_;
    std::chrono::steady_clock::time_point since_;
};

class Step {
public:
    Step(const DecoderKernels& kernels, const DecoderShape& shape, int64_t tokens, float* memory, double* seconds)
        : kernels_(kernels), shape_(shape), rows_(tokens), threads_(int(shape.threads)), clock_(seconds) {
        qkv_width_ = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        hidden_ = memory;
        for (int64_t i = 0; i < ANGLES; ++i) angles_[i] = hidden_ + tokens * (shape.width + i * shape.head_dim);
        normed_ = hidden_ + tokens * (shape.width + ANGLES * shape.head_dim);
        changed_ = normed_ + tokens * shape.width;
        qkv_ = changed_ + tokens * shape.width;
        attended_ = qkv_ + tokens * qkv_width_;
        gate_up_ = attended_ + tokens * shape.heads * shape.head_dim;
        gated_ = gate_up_ + tokens * 2 * shape.mlp_width;
    }

    void run(const void* runs, const DecoderWanted* wanted, const DecoderTokens& tokens, float* out) {
        embed(tokens);
        const float* added = nullptr;  // what the layer before adds; added where it is normed next
        for (int64_t i = 0; i < shape_.layers; ++i) {
            const DecoderLayer& layer = shape_.layer[i];
            const DecoderMatrix* part = layer.part;
            norm(added, layer.before_attention, normed_);
            part = multiply(part, layer.parts[0], normed_, qkv_, qkv_width_);
            const bool some = wanted && i + 1 == shape_.layers;
            attend(layer, some ? wanted->runs : runs);
            if (some) keep(*wanted);
            if (!rows_) return;
            part = multiply(part, layer.parts[1], attended_, changed_, shape_.width);
            norm(changed_, layer.before_mlp, normed_);
            part = multiply(part, layer.parts[2], normed_, gate_up_, 2 * shape_.mlp_width);
            kernels_.gate(gate_up_, gated_, rows_, shape_.mlp_width, 2 * shape_.mlp_width, int(shape_.activation), 0, threads_);
            clock_.took(ROWS);
            multiply(part, layer.parts[3], gated_, changed_, shape_.width);
            added = changed_;
        }
        norm(added, shape_.norm, out);
    }

private:
    /// Each token's embedding, and the angles of its position.
    void embed(const DecoderTokens& tokens) {
        const float scale = float(shape_.embedding_scale);
        for (int64_t row = 0; row < rows_; ++row) {
            const float* from = shape_.embedding + tokens.ids[row] * shape_.width;
            float* to = hidden_ + row * shape_.width;
            for (int64_t i = 0; i < shape_.width; ++i) to[i] = from[i] * scale;
            for (int64_t i = 0; i < ANGLES; ++i)
                std::copy_n(tokens.angles[i] + tokens.positions[row] * shape_.head_dim, shape_.head_dim, angles_[i] + row * shape_.head_dim);
        }
        clock_.took(ROWS);
    }

    /// From here on there are only the wanted rows. They fit where more rows were that nobody needs any more.
    void keep(const DecoderWanted& wanted) {
        auto gather = [&](float*& rows, int64_t width, float*& unused) {
            for (int64_t i = 0; i < wanted.count; ++i) std::copy_n(rows + wanted.rows[i] * width, width, unused + i * width);
            std::swap(rows, unused);
        };
        gather(hidden_, shape_.width, normed_);
        gather(attended_, shape_.heads * shape_.head_dim, qkv_);
        rows_ = wanted.count;
        clock_.took(ROWS);
    }

    void norm(const float* added, const float* weight, float* out) {
        kernels_.norm(hidden_, added, weight, out, rows_, shape_.width, shape_.width, shape_.width, float(shape_.eps), 0, threads_);
        clock_.took(ROWS);
    }

    const DecoderMatrix* multiply(const DecoderMatrix* part, int64_t parts, const float* x, float* y, int64_t width) {
        for (int64_t i = 0; i < parts; y += part->outputs, ++i, ++part)
            kernels_.linear(x, part->inputs, rows_, part->inputs, part->packed, int(part->bits), int(part->half), int(part->minima), part->bias,
                            y, width, part->outputs, threads_);
        clock_.took(LINEARS);
        return part;
    }

    void attend(const DecoderLayer& layer, const void* runs) {
        float* const* angles = angles_ + 2 * layer.local;
        const float *k = qkv_ + shape_.heads * shape_.head_dim, *v = k + shape_.kv_heads * shape_.head_dim;
        kernels_.attention(layer.shape, runs, qkv_, k, v, angles[0], angles[1], layer.keys, layer.values, attended_);
        clock_.took(ATTENTION);
    }

    const DecoderKernels& kernels_;
    const DecoderShape& shape_;
    int64_t rows_, qkv_width_;
    const int threads_;
    static constexpr int64_t ANGLES = 4;  // cosines and sines, twice
    float* angles_[ANGLES];               // [token][head_dim] each
    float *hidden_, *normed_, *changed_, *qkv_, *attended_, *gate_up_, *gated_;
    Clock clock_;
};

}  // namespace

extern "C" {

/// Floats that a step needs beside its tensors, for each token.
int64_t agentrt_decoder_memory(const DecoderShape* shape) {
    return 3 * shape->width + (4 + 2 * shape->heads + 2 * shape->kv_heads) * shape->head_dim + 3 * shape->mlp_width;
}

/// Runs all layers and the last norm; answers -1, or, before anything is done, which token has an id or a position that there is not.
///
/// runs: an AttentionRuns. wanted: null if all rows are. memory: of `agentrt_decoder_memory` floats a token. out [wanted or tokens, width].
/// seconds [3]: what linears, attention, and what is done row by row took is added to them.
int64_t agentrt_decoder(const DecoderKernels* kernels, const DecoderShape* shape, const DecoderTokens* tokens, const void* runs,
                        const DecoderWanted* wanted, float* memory, float* out, double* seconds) {
    for (int64_t i = 0; i < tokens->count; ++i) {
        const bool known = 0 <= tokens->ids[i] && tokens->ids[i] < shape->vocabulary;
        if (!known || tokens->positions[i] < 0 || tokens->positions[i] >= tokens->reach) return i;
    }
    Step(*kernels, *shape, tokens->count, memory, seconds).run(runs, wanted, *tokens, out);
    return -1;
}
}
