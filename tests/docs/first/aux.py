import time

import torch

from pdstage import DecodeNode, MetadataBuffers, PrefillNode
from pdstage.metadata import usual_columns
from tests.docs.first.pool import made, pool, topology


def until(done):
    deadline_at = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_at
        node.poll_many([sender])
        decode.poll_many([receiver])


sender = PrefillNode(made(), topology).send("another")
