"""Measurements and proofs behind the figures of the documentation."""
