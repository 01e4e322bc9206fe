"""What is saved and loaded: the keys of states, their interchange with other libraries, exact weights, and files."""
