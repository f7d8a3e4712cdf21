"""`pdstage calibrate`: what each transport costs between this host and another, or within this one.

Two processes, each with a node over the same made-up pool: `peer` receives and is told what to do next, `caller` sends,
measures and fits. Rooms are timed end to end by both paths, so that what a node itself costs is in the numbers.
"""
