"""A deterministic simulator of prefill and decode ranks: the real cores, rings and books under a virtual clock.

`run.run(seed, steps=500) -> Report` is the face; it raises `Failed`, a `Violation` whose `invariant` is the number of
the invariant of DESIGN 8 that does not hold ("I2"), or "error" where a core raised. Equal seeds do equal things, in any
process. `pdstage sim` runs many, and shrinks, explains and replays what fails.

    scenario    what a seed stands for: ranks, sizes, the transport's promises, rates of faults, each room's jobs
    scheduler   draws the next event: what moves, what goes wrong, whose engine acts, when time passes
    world       `pair.World` moved by such events
    fabric      the modelled data plane: posts that land late, in pieces, or fail, with real bytes
    side        one process: its engine's pages, and what every byte of its memory must be
    engines     who announces, binds, submits, computes and aborts rooms, from small pools of pages
    checks      the invariants
    run         one seed, one schedule again; shrinking
    seeds       many seeds, and what is told of them

Beside it, each with a module of its own that runs by `python -m`:

    manager     whole nodes, with their threads: what drivers, handles and look-ups do to each other (a package)
    mutants     deliberate bugs and who sees them (bugs_leases, bugs_rooms, bugs_sessions, bugs_engine, bugs_aux,
                bugs_nodes)
"""
