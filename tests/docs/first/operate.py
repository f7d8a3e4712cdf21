from pdstage import DecodeNode
from tests.docs.first.pool import pool, topology

node = DecodeNode(pool, topology, transport="local")


def host_is_down(endpoint):
    return False
