"""The commands of `flashopt`. Each file has `add_arguments(parser)` and `run(options)`; `table` formats output."""
