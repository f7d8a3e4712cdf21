"""vLLM's connector: prefill and decode engines of vLLM 0.33 that hand KV caches over by pdstage, with one flag.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdStageConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "pdstage.integrations.vllm"}'

To read in this order:

    settings     what an operator may say in `kv_connector_extra_config`
    groups       vLLM's cache groups as pdstage's components: which blocks of a request, for which tokens
    metadata     what the scheduler's side tells the workers' in each step
    streams      requests that are handed over while prefill computes them
    turns        what decode keeps of a conversation for its next turn
    scheduler    the scheduler's side: requests in, metadata out
    caches       the workers' KV cache tensors as a pdstage layout
    worker       the workers' side: nodes, rooms, and what became of them
    stats        what is counted, for vLLM's log and its Prometheus endpoint
    connector    the class that vLLM loads, which only passes calls on

**How the two sides find each other.** As with vLLM's own connectors, the proxy sends a request to prefill first, with
`kv_transfer_params={"do_remote_decode": true}`, and what prefill answers as `kv_transfer_params` goes with the request
to decode, unread. Each prefill worker hands what it advertises to its engine's scheduler by `get_handshake_metadata`;
the scheduler's side serves those adverts as a bootstrap directory, at `remote_host` and `remote_port` of every answer.

A router may also ask both engines at once, as it does for vLLM's MooncakeConnector: it names the room itself, by
`transfer_id`, and finds the engine's name by `GET /query` of the same directory. Decode then opens the room while
prefill works, and each step's chunk is handed over at that step's end.

**Who begins.** pdstage's decode side announces a room and prefill writes into it. When prefill has finished a request
its workers `send` the room that the answer names, `remote_room`, hand over all its chunks and `finish`.
The blocks stay the room's: nothing moves before decode opens the room, and they go back to vLLM (`finished_sending`)
once the room is `released`. If no decode ever opens it they go back after `Config.open_wait_s`. Decode's workers
`receive` and `bind` the room when its scheduler has allocated blocks, and tell the end (`finished_recving`) once the
room is `released` there, Success or not: no write can land in a block that vLLM has given to another request.

**What never happens.** A request whose room failed is reported in `failed_recving`, and vLLM recomputes it or fails it,
as `kv_load_failure_policy` says. It never goes on from KV that is not there: Success covers every byte asked for.

**Decode's last token.** vLLM computes the last prompt token again at decode. A recurrent state must not have seen it,
and the window of that token starts one token before the blocks that prefill still has. So with either kind of group
prefill stops one token short, as vLLM's NIXL connector has it for recurrent states.
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

if PdStageConnector.__name__ not in KVConnectorFactory._registry:  # by that name MultiConnector finds its parts' stats
    KVConnectorFactory.register_connector(PdStageConnector.__name__, __name__, PdStageConnector.__name__)
