"""Other projects' code beside ours, on the same bytes in the same run, if a copy of it is available.

None of it is kept here: it is found installed, or at a given path.
"""
