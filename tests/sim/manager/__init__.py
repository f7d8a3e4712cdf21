"""A deterministic simulator of whole nodes: real `PrefillNode` and `DecodeNode`, with their threads, in one process.

It stands beside the simulator of the protocol cores, whose words it shares; that one sees every order of frames, this
one what drivers, handles, look-ups and engines' threads do to each other. `run.run(seed) -> Report` is the face; it
raises `Failed`. Equal seeds do equal things. `python -m tests.sim.manager --seeds N`, or `--seed K --trace`.

    scheduler   one thread runs at a time; who is next is drawn at each lock, wake-up, clock and line of the manager
    primitives  locks, events, queues, threads and clocks as the manager sees them, made of the scheduler
    loop        an event loop made of them
    network     control sockets: frames come late, connections break
    fabric      the transport: posts land late, in pieces, or fail, between real memory
    bootstrap   who is asked for prefill ranks, and when it answers
    scenario    what a seed stands for: nodes, rooms, faults and their rates
    world       puts all of that in the manager's place, and makes the nodes
    engines     the threads of engines: they send, receive, wait, poll, abort and close
    checks      what must hold
    run         one seed
"""
