"""What an operator may say in `kv_connector_extra_config`, checked once.

Layer 6. Must not know requests, caches or nodes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm.utils.network_utils import get_ip

from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.protocol.config import Config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`host` is where this engine listens: "auto" is what vLLM takes for its own (VLLM_HOST_IP). `port` is that of the
    directory of a prefill engine, plus its data-parallel index; 0 is any. Beyond loopback `keys`, a key file's path, or
    `insecure` is needed. The others are arguments of pdstage's nodes, `config` the fields of its `Config`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keys: str | None = None
    insecure: bool = False
    transport: str = "auto"
    path: str = "auto"
    staging_nbytes: int = 256 << 20
    config: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(vllm_config: VllmConfig) -> Settings:
        """Raises `UsageError` for a value that cannot be; names that are not ours are only logged."""
        given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        known = {one.name: one for one in fields(Settings)}
        for name in sorted(given.keys() - known):
            log.warning("kv_connector_extra_config has %r, which pdstage does not know: it knows %s", name, list(known))
            del given[name]
        settings = Settings(**given)
        settings.limits()
        if settings.host == "auto":
            given["host"] = get_ip()
        if settings.port:
            given["port"] = settings.port + vllm_config.parallel_config.data_parallel_index
        return Settings(**given)

    def limits(self) -> Config:
        """The nodes' deadlines and limits."""
        try:
            return Config(**self.config)
        except TypeError as error:
            known = ", ".join(one.name for one in fields(Config))
            raise UsageError(
                f"kv_connector_extra_config has a config that is none: {error}", remedy=f"its fields are {known}"
            ) from error

    @property
    def bind(self) -> str:
        """What a node's control socket is bound to."""
        return f"tcp://{Address(self.host, 0)}"

    def node(self) -> dict[str, Any]:
        """The arguments that both kinds of node share."""
        return {
            "transport": self.transport, "path": self.path, "staging_nbytes": self.staging_nbytes, "keys": self.keys,
            "insecure": self.insecure, "bind": self.bind, "config": self.limits(), "progress": "thread",
        }  # fmt: skip
