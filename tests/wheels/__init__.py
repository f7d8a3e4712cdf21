"""Builds wheels and tries them in empty venvs; see `python -m tests.wheels --help`."""
