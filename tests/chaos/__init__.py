"""Chaos: real processes over the real nodes, killed, stopped, drained, cut off and restarted while rooms flow.

`python -m tests.chaos` (`make chaos`) runs rounds; each draws a site and its faults from a seed and a number. Read
`plan` (what is drawn), `memory` (what every byte must be), `engine` and `rank` (what a rank does), `account` (what its
node holds), `network` (how ranks are cut off), `member` and `round` (one site's life).

`test_soak` looks for leaks: one node for long, and its peers in the same process.
"""
