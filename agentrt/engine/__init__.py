"""The step loop: plans from the scheduler, tensors in the executor, deltas to the caller."""
