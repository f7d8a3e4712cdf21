"""Other projects' code beside ours, on the same bytes in the same run, where a copy of it is at hand.

Nothing of theirs is kept here: it is found installed, or at a path that is given.
"""
