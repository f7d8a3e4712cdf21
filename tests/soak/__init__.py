"""Thousands of peers that come and go, on real sockets; see `python -m tests.soak --help`."""
