"""The operator's options in `kv_connector_extra_config`, checked once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.utils.network_utils import get_ip

from pdstage import DecodeNode, PrefillNode, UsageError
from pdstage.arguments import flag, integer, number
from pdstage.control.address import Address
from pdstage.integrations.operated import Operated
from pdstage.integrations.options import node_options, trusts_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ParallelConfig, VllmConfig


_WHERE = "kv_connector_extra_config"
_DEADLINES = {"hello_s": 10.0, "wait_s": 60.0, "max_deadline_s": 86_400.0}
"""Prefill has answered the proxy with the whole request computed: an engine that is absent now is gone, and a room that
gets no data was another request's. A request may queue at decode for hours.
"""


class Turns(NamedTuple):
    """What decode keeps for a conversation's next turn, by the names of vLLM's NixlConnector (`bidirectional_kv_xfer`
    enables it): for how many seconds (`decoder_kv_blocks_ttl`), and how few tokens prefill does not load
    (`kv_recompute_threshold`).
    """

    ttl_s: float
    fewest: int

    @staticmethod
    def of(options: dict[str, Any], role: str) -> Turns | None:
        """Takes its names out of `options`. Raises `UsageError` for invalid values."""
        asked = flag("bidirectional_kv_xfer", options.pop("bidirectional_kv_xfer", False))
        ttl_s = number("decoder_kv_blocks_ttl", options.pop("decoder_kv_blocks_ttl", 480.0), above=0.0)
        fewest = integer("kv_recompute_threshold", options.pop("kv_recompute_threshold", 64), low=0)
        if asked and role != "kv_both":
            raise UsageError(
                f"bidirectional_kv_xfer with kv_role {role!r}",
                remedy='say "kv_role": "kv_both" on both sides: each sends, and each receives',
            )
        return Turns(ttl_s, fewest) if asked else None


class Settings:
    """`host` is where this engine listens; "auto" is vLLM's own address (VLLM_HOST_IP). `port` is that of a prefill
    engine's own directory; 0 is any. A data-parallel replica of vLLM is an engine of its own: `replica` is its number
    among those behind one API server, and `shared` the address of the first one's directory; "" if it is the first, or
    its port is not known. Beyond loopback `keys` (a key file's path) or `insecure` is required. `trust_layout` admits
    caches whose layout nothing proves. `options` are other arguments of pdstage's nodes, `config` the fields of
    `Config`. `turns`, if set, are kept for the next turn of their conversation. `lease_s` (vLLM's NixlConnector:
    `kv_lease_duration`) is how long prefill holds a request that no decode engine asks for; one that waits with it says
    so every few seconds. Where the proxy asks both at once, prefill begins a room as its request arrives, so decode
    waits no longer for one that prefill refused.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.options = options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        host, port = options.pop("host", "127.0.0.1"), options.pop("port", 0)
        self.trust_layout = trusts_layout(options, where=_WHERE)
        self.turns = Turns.of(options, vllm_config.kv_transfer_config.kv_role)
        self.lease_s = number("kv_lease_duration", options.pop("kv_lease_duration", 30.0), above=0.0)
        self.host: str = get_ip() if host == "auto" else host
        self.replica, first_at, offset = _replica(vllm_config.parallel_config, self.host)
        self.shared = str(Address(first_at, port)) if port and first_at else ""
        self.port: int = port and port + offset
        self._before = offset * vllm_config.parallel_config.world_size
        """Ranks of the replicas before this one, if they may share a host."""

    def node(self, kind: type[PrefillNode | DecodeNode], model: Mapping[str, str] | None = None) -> dict[str, Any]:
        """A node's arguments; `model` is vLLM's facts. Raises `UsageError` for arguments that no node takes."""
        deadlines = {**_DEADLINES, "send_wait_s": self.lease_s, "open_wait_s": self.lease_s}
        arguments = node_options(kind, self.options, where=_WHERE, deadlines=deadlines, model=model or {})
        return {"bind": f"tcp://{Address(self.host, 0)}", "progress": "thread", **arguments}

    def operated(self, rank: int, name: str) -> Operated:
        """What operators have of that rank's nodes, in the engine `name`. Raises `UsageError`."""
        return Operated(self.options, where=_WHERE, engine="vllm", name=name, rank=self._before + rank)


def _replica(parallel: ParallelConfig, host: str) -> tuple[int, str, int]:
    """The number of a data-parallel replica, the host of the first one, or "" if it is that, and by how much its own
    directory's port is above the configured one.
    """
    index = parallel.data_parallel_index
    if parallel.data_parallel_external_lb:
        # Each has an API server, on whatever host, and local rank 0. vLLM's NixlConnector numbers its ports alike.
        return 0, "", index
    if parallel.local_engines_only:  # an API server on each host, in front of that host's replicas
        number = parallel.data_parallel_rank_local or 0
        return number, host if number else "", number
    master = parallel.data_parallel_master_ip
    return index, (host if master == "127.0.0.1" else master) if index else "", index
