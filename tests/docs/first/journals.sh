mkdir journals
python - <<'PROGRAM'
from pdstage import DecodeNode, PrefillNode
from tests.docs.first.pool import made, topology

options = {"transport": "local", "progress": "thread", "journal": "journals"}
with PrefillNode(made(), topology, **options) as prefill, DecodeNode(made(), topology, **options) as decode:
    receiver, sender = decode.receive("request", prefill.bootstrap_address), prefill.send("request")
    receiver.bind([1, 2], 32)
    sender.chunk([3, 4], 32)
    sender.finish()
    receiver.wait(60)
PROGRAM
