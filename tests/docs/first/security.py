from pathlib import Path

import numpy as np

from pdstage import DecodeNode, Keys, Pool, Topology
from pdstage.tensors import build, paged_nhd

k, v = np.zeros((2, 1, 8, 16, 2, 64), np.float32)
pool, topology = Pool.of(build(paged_nhd(k, v, total_heads=2, tp=(1, 0)))), Topology()
Path("allow").write_text(Keys.make("node7.key").public.hex() + "\n")
