"""Attention over the paged store: one interface, and the backends behind it."""
