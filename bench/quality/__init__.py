"""Training with exact fp32 optimizers beside ours: what `make quality` runs and docs/quality.md shows."""
