from pathlib import Path

from pdstage import PrefillNode
from pdstage.manager.calibration import VERSION, Calibration
from pdstage.plan.cost import CostModel
from pdstage.tools.results import save
from tests.docs.first.pool import pool, topology

cost = CostModel.linear(bytes_per_s=5e9, descriptor_s=2e-6, post_s=1e-5)
made = Calibration(version=VERSION, made_at="", prefill_host="", decode_host="", transports={"local": cost})
save(made, Path("costs.json"))
