"""vLLM's connector: prefill and decode engines of vLLM 0.33 transfer KV caches by pdstage, with one flag.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdStageConnector", "kv_role": "kv_producer"}'

Read in this order:

    plugin           how vLLM, and NVIDIA Dynamo, know the connector by its name
    settings         the operator's options in `kv_connector_extra_config`
    groups           vLLM's cache groups as pdstage's components: which blocks of a request, for which tokens
    metadata         what the scheduler's side tells the workers' side in each step
    streams          requests that are sent while prefill computes them
    loads            the rooms that requests load, from their arrival on, and what decode keeps for a next turn
    scheduler        the scheduler's side: requests in, metadata out
    caches, states   the workers' KV cache tensors and recurrent states as a pdstage layout, by their attention backend
    writers          the proof of that layout by vLLM's own cache writes
    worker           the workers' side: nodes, rooms and their results
    stats            counters for vLLM's log and its Prometheus endpoint
    connector        the class that vLLM loads, which only forwards calls

**How the two sides find each other.** As with vLLM's own connectors, the proxy sends a request to prefill first, with
`kv_transfer_params={"do_remote_decode": true}`. The `kv_transfer_params` of prefill's answer go with the request to
decode, unread. Each prefill worker passes its advert to its engine's scheduler by `get_handshake_metadata`. The
scheduler's side serves the adverts as a bootstrap directory, at `remote_host` and `remote_port` of every answer.

A router may also ask both engines at once, as for vLLM's MooncakeConnector. It names the room itself, by `transfer_id`,
and finds the engine's name by `GET /query` of the same directory. Decode then opens the room while prefill works, and
each step's chunk is sent at that step's end.

**Who begins.** Decode announces a room and prefill writes into it. When prefill has finished a request, its workers
`send` the room that the answer names, `remote_room`, pass all its chunks and `finish`. The room keeps the blocks:
nothing moves before decode opens it. They go back to vLLM (`finished_sending`) once the room is `released`, or after
`kv_lease_duration` (30 s) if no decode engine waits with it. Decode's workers `receive` the room as its request
arrives, and from then on their heartbeats hold it at prefill. They `bind` it when the scheduler has allocated blocks,
and report its end (`finished_recving`) once it is `released`, after Success or not: no write can then land in a block
that vLLM has given to another request.

**What never happens.** A request whose room failed is reported in `failed_recving`, and vLLM recomputes or fails it, by
`kv_load_failure_policy`. It never goes on with missing KV: Success covers every byte that was asked for.

**Decode's last token.** vLLM computes the last prompt token again at decode. A recurrent state must not have seen that
token, and its window starts one token before the blocks that prefill still has. So with either kind of group prefill
stops one token short, as vLLM's NIXL connector does for recurrent states.
"""

from __future__ import annotations

try:
    import vllm as _vllm  # noqa: F401
except ImportError as error:
    from pdstage.errors import UsageError

    raise UsageError(
        "pdstage.integrations.vllm was imported without vLLM",
        remedy="install pdstage into vLLM's own environment, or `pip install pdstage[vllm]`",
        extra="vllm",
    ) from error

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from pdstage.integrations.vllm.connector import PdStageConnector

__all__ = ["PdStageConnector"]

if PdStageConnector.__name__ not in KVConnectorFactory._registry:  # MultiConnector finds its parts' stats by that name
    KVConnectorFactory.register_connector(PdStageConnector.__name__, __name__, PdStageConnector.__name__)
