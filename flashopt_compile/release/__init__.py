"""Gradient release: each parameter is stepped during backward, as soon as its gradient is complete."""
