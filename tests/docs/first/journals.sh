mkdir journals
python - <<'PROGRAM'
import numpy as np

from pdstage import DecodeNode, Pool, PrefillNode, Topology
from pdstage.tensors import build, paged_nhd

kept = []  # an engine's memory is the engine's to keep


def made():
    kept.append(np.zeros((2, 1, 8, 16, 2, 64), np.float32))
    return Pool.of(build(paged_nhd(*kept[-1], total_heads=2, tp=(1, 0))))


options = {"transport": "local", "progress": "thread", "journal": "journals"}
with PrefillNode(made(), Topology(), **options) as prefill, DecodeNode(made(), Topology(), **options) as decode:
    receiver, sender = decode.receive("request", prefill.bootstrap_address), prefill.send("request")
    receiver.bind([1, 2], 32)
    sender.chunk([3, 4], 32)
    sender.finish()
    receiver.wait(60)
PROGRAM
