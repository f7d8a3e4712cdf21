from pdstage import DecodeNode
from tests.docs.first.pool import pool, topology
