"""Sharded parameters: the only training code that knows DTensor."""
