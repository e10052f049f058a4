"""Engines behind the Backend protocol."""
