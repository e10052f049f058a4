// Threads that do one thing after the other together. A function called "shared" is called by every thread of a team, with the same arguments, and what
// it gives is there for all of them when it returns; a step of a model is one team, and so are the plain functions, each for itself.
#pragma once

#include <omp.h>

#include <cstdint>

namespace agentrt {
namespace {

/// Rows up to which every thread does for itself what is done row by row, in memory of its own: to share it and wait would take longer.
constexpr int64_t FEW = 2;

/// A part of so many rows: those of the calling thread.
struct Part {
    int64_t first, last;
};

inline Part own_part(int64_t rows) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    return {rows * thread / threads, rows * (thread + 1) / threads};
}

/// Memory that the calling thread will read next. Who computes more than he reads asks for it meanwhile, a few lines at a time.
struct Coming {
    const char *at, *stop;

    /// Inlined, since a compiler sees no effect in a call of this and leaves it out.
    __attribute__((always_inline)) void ask() {
        for (int line = 0; line < 4 && at < stop; ++line, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

inline void wait_for_all() {
#pragma omp barrier
}

}  // namespace
}  // namespace agentrt
