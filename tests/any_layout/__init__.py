"""Any layout to any layout: drawn pairs of engines, and every destination byte held to a per-element oracle.

`check.run(seed)` draws one case, moves it through the library's own planner, staging, kernels and direct path, and
raises `check.Wrong` where a byte, or the number of bytes that travelled, is not what the description says. A case is
its seed; `python -m tests.any_layout --seed N` replays one, `--cases N` tries many.

    tape        the choices a case is drawn from, and how a failing one is shrunk
    describe    what is drawn: components, how each side stores them, who holds what, and in which chunks it travels
    draw        a description from a tape
    held        memory: the value of each logical cell, where a description puts it, and what must be there afterwards
    check       one case through the library, and the comparison
    bugs        deliberate bugs; each must be found

Only `held.layout_of` and `check` know the library; the oracle is the rest of `held`, from the description alone.
"""
