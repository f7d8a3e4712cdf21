"""Hostile input: what strangers and peers that lie may send, and what must not come of it. `make fuzz` runs it long."""
