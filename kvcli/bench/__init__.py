"""Measurements: how true policies are to the full cache, how fast they are, and why."""
