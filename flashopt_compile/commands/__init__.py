"""The commands of `flashopt`, one file each: `add_arguments(parser)` and `run(options)`; and how they print."""
