"""Saving and loading: the keys of states, interchange with other libraries, exact weights, and files."""
