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

inline void wait_for_all() {
#pragma omp barrier
}

}  // namespace
}  // namespace agentrt
