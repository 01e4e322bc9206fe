"""The commands of `flashopt`, one file each: `HELP`, `add_arguments(parser)` and `run(options)`."""
