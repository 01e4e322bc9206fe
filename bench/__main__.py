"""python -m bench: what `make bench` runs."""

from bench import formats

formats.main()
