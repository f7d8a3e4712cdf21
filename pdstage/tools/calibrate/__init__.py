"""`pdstage calibrate`: the cost of each transport between this host and another, or within this one.

Two processes each have a node over the same synthetic `pool`. `peer` receives as it is asked, `caller` sends, measures
and fits. Rooms are timed end to end by both paths, so the numbers include the nodes' own cost.
`fit` turns timings into a `CostModel`; `about` describes a side.
"""
