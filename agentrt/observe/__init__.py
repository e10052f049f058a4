"""Metrics, traces and reports. No tensors."""
