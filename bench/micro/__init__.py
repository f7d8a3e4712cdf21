"""Microbenchmarks that pytest-benchmark drives. Layer 7."""
