"""A run's memory before anything is allocated: shapes of models, and the bytes of our optimizers and of others."""
