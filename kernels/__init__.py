"""Kernels for the hot paths, each beside its plain-torch reference (import name: agentrt.kernels).

Launches of Triton's say `enable_fp_fusion`: a multiplication and an addition are one instruction, which is its default until 3.9 alone.
"""
