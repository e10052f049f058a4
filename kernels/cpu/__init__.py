"""Native kernels for processors: C++ with a plain C interface, compiled on first use, each beside its torch reference."""
