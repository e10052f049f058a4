"""Kernels for the hot paths, each beside its plain-torch reference (import name: agentrt.kernels)."""
