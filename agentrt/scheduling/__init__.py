"""Sequences, policies and plans: what each step computes. No tensors."""
