import numpy as np

from pdstage import DecodeNode, Items, Pool, Topology
from pdstage.tensors import Section, build, mamba_conv, mamba_ssm, sglang_mha

rank, n_tokens, mamba_slot = 1, 5000, 2
swa_layers, linear_layers = [1, 3], [2, 4]
k, v, swa_k, swa_v = np.zeros((4, 2, 6400, 2, 16), np.float16)
conv, temporal = np.zeros((2, 4, 2048, 3), np.float16), np.zeros((2, 4, 8, 16, 16), np.float16)
pages, swa_pages = np.arange(79), np.arange(65)


def receive(layout):
    node = DecodeNode(Pool.of(layout), Topology(tp_size=4, tp_rank=rank))
    return node.receive("request", directory="127.0.0.1:1")
