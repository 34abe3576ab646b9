"""Knows models and tensors, and nothing of the terminal."""
