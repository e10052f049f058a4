"""The KV cache's bookkeeping: radix tree, page pool, eviction, prefix cache. No tensors."""
