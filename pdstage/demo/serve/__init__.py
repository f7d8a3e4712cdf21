"""A small serving stack, prefill and decode apart, in which pdstage moves all state: `pdstage serve`.

An example of how an engine uses pdstage, not an engine: a tiny model of random weights, on the CPU. A prefill server, a
decode server and a router are processes of their own and speak OpenAI's API.

Layer 6 (demo). Read in this order:

    nodes                 a server's ranks at pdstage: the calls an engine makes
    blocks                who holds which pages; prefixes that are kept, and evicted
    compute               the model on all ranks of a server
    scheduler, prefill, decode    the loop of a server: admission, chunks, steps, and when pages are free again
    text, api             tokens, and OpenAI's requests, answers and errors
    web, server, router   HTTP: draining, clients that go away, servers that die
    everything            all of it with one command
    options, arguments    what can be asked for
"""
