from pathlib import Path

from pdstage import DecodeNode, Keys
from tests.docs.first.pool import pool, topology

Path("allow").write_text(Keys.make("node7.key").public.hex() + "\n")
