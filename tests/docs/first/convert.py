import numpy as np

from pdstage import Config, Key
from pdstage.plan.convert import fp8_tensor, mxfp8, reformat
from pdstage.tensors import build, paged_nhd

k, v = np.zeros((2, 2, 8, 16, 4, 132), np.uint8)
scale_of = {"k": [0.5, 0.25], "v": [2.0, 1.0]}
