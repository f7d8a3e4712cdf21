"""Microbenchmarks that pytest-benchmark drives."""
