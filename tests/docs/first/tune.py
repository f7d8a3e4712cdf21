from pathlib import Path

import numpy as np

from pdstage import Pool, PrefillNode, Topology
from pdstage.plan.cost import CostModel
from pdstage.manager.calibration import VERSION, Calibration
from pdstage.tensors import build, paged_nhd

cost = CostModel.linear(bytes_per_s=5e9, descriptor_s=2e-6, post_s=1e-5)
Calibration(version=VERSION, made_at="", prefill_host="", decode_host="", transports={"local": cost}).write(
    Path("costs.json")
)
k, v = np.zeros((2, 1, 8, 16, 2, 64), np.float32)
pool, topology = Pool.of(build(paged_nhd(k, v, total_heads=2, tp=(1, 0)))), Topology()
