"""Any layout to any layout: drawn pairs of engines, and every destination byte held to a per-element oracle.

`check.run(seed)` draws one case, moves it through the library's own planner, staging, kernels and direct path, and
raises `check.Wrong` where a byte, or the number of bytes that travelled, is not what the description says. A case is
its seed.

    describe    what is drawn: components, how each side stores them, who holds what, and in which chunks it travels
    draw        a description, at random
    held        memory: the value of each logical cell, where a description puts it, and what must be there afterwards
    check       one case through the library, and the comparison

Only `check` knows the library; the oracle is `held`, from the description alone.
"""
