"""Chaos: real processes over the real nodes, killed, stopped, cut off and restarted while rooms flow.

`python -m tests.chaos` (or `make chaos`) runs rounds; each draws a site (sizes, path, transport, progress) and its
faults from a seed and a number alone. Read `plan` (what is drawn), `truth` and `pages` (what every byte must be),
`engine` and `worker` (what a rank does), `network` (how ranks are cut off), `member` and `round` (one site's life),
`__main__` (all of them, and the report), `control` (the proof that the checks can fail).
"""
