"""A Llama split over tensor-parallel ranks and pipeline stages, attending over a paged pool: a small real engine.

Weights come as a state dict; sums over ranks go through a given group. The arithmetic follows transformers'
`modeling_llama.py` step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from pdstage.errors import UsageError
from pdstage.layout.topology import shard_range
from pdstage.tools.demo.families import stage_layers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdstage.layout.topology import Topology
    from pdstage.tools.demo.options import ModelShape
    from pdstage.tools.demo.pools import PagedPool, Table

Weights: TypeAlias = "dict[str, torch.Tensor]"


class HeadShare(NamedTuple):
    """One rank's heads: it holds KV heads `[kv_start, kv_stop)` and computes query heads `[q_start, q_stop)`."""

    kv_start: int
    kv_stop: int
    q_start: int
    q_stop: int


def head_share(shape: ModelShape, tp: int, rank: int) -> HeadShare:
    """KV heads by `shard_range`; each query head goes to exactly one of the ranks that hold its KV head.

    With more ranks than KV heads the replicas of a head divide its queries; a replica may have none.
    """
    start, stop = shard_range(shape.kv_heads, tp, rank)
    replicas = [r for r in range(tp) if shard_range(shape.kv_heads, tp, r) == (start, stop)]
    n, at = (stop - start) * shape.queries_per_kv_head, replicas.index(rank)
    q_start, q_stop = _even(n, len(replicas), at)
    first = start * shape.queries_per_kv_head
    return HeadShare(start, stop, first + q_start, first + q_stop)


def _even(total: int, parts: int, at: int) -> tuple[int, int]:
    """Part `at` of `total` cut into `parts` ranges that cover it once; unlike in `shard_range` a part may be empty."""
    return at * total // parts, (at + 1) * total // parts


def slice_weights(full: Mapping[str, torch.Tensor], shape: ModelShape, place: Topology) -> Weights:
    """One rank's part of a transformers Llama state dict: columns of q, k, v, gate, up; rows of o and down; its layers.

    Embedding, norms and the head are kept whole. Names do not change.
    """
    tp, rank, layers = place.tp_size, place.tp_rank, stage_layers(shape.layers, place)
    share, dim = head_share(shape, tp, rank), shape.head_dim
    q = slice(share.q_start * dim, share.q_stop * dim)
    kv = slice(share.kv_start * dim, share.kv_stop * dim)
    mlp = slice(*_even(shape.intermediate, tp, rank))
    outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv, "gate_proj": mlp, "up_proj": mlp}
    inputs = {"o_proj": q, "down_proj": mlp}
    sliced: Weights = {}
    for name, weight in full.items():
        path = name.split(".")
        part = path[-2]
        if path[1] == "layers" and int(path[2]) not in layers:
            continue
        if part in outputs:
            weight = weight[outputs[part]]  # noqa: PLW2901  (torch stores [out, in])
        elif part in inputs:
            weight = weight[:, inputs[part]]  # noqa: PLW2901
        sliced[name] = weight.detach().clone()
    return sliced


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + n)` of one request, whose KV lives in `table`; all before `start` is there already."""

    table: Table
    start: int
    n: int


class Sums(Protocol):
    """What a model needs of the ranks it computes with; `group.Group` is one."""

    def sum(self, partial: torch.Tensor) -> None:
        """Adds up `partial` of the stage's ranks in place."""

    def hand_on(self, hidden: torch.Tensor, stage: int) -> None:
        """Puts `stage`'s `hidden` in place of every other stage's."""


class ShardedLlama:
    """One rank's model, where its weights are. `group`: the ranks it computes with, of all stages.

    What transformers computes in float32, whatever the model's dtype, is computed on the CPU: there alone is it the
    same to the last bit as in the process that judges.
    """

    def __init__(self, shape: ModelShape, weights: Weights, place: Topology, group: Sums) -> None:
        self.shape = shape
        self.share = head_share(shape, place.tp_size, place.tp_rank)
        self._place = place
        self._weights = weights
        self._group = group
        self._device = weights["model.embed_tokens.weight"].device
        queries = torch.arange(self.share.q_start, self.share.q_stop, device=self._device)
        self._kv_of_query = queries // shape.queries_per_kv_head - self.share.kv_start
        exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._inv_freq = 1.0 / shape.rope_theta**exponent

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], segments: Sequence[Segment], kv: PagedPool) -> torch.Tensor:
        """Logits `[len(segments), vocab]` after each segment's last token; stores all tokens' K and V in `kv`.

        `tokens` are those of all segments, one after the other. Raises `UsageError` unless their numbers agree.
        """
        if len(tokens) != sum(segment.n for segment in segments):
            raise UsageError(
                f"{len(tokens)} tokens for {sum(s.n for s in segments)} positions", remedy="make them equal"
            )
        positions = torch.cat([torch.arange(s.start, s.start + s.n) for s in segments])
        rotation = self._rotation(positions)
        given = torch.tensor(tokens, device=self._device)
        hidden = embedding(given, self._weights["model.embed_tokens.weight"])
        for stage in range(self._place.pp_size):
            if stage == self._place.pp_rank:
                hidden = self._through_stage(hidden, rotation, segments, kv)
            self._group.hand_on(hidden, stage)
        last = torch.tensor([s.n for s in segments], device=self._device).cumsum(0) - 1
        return self._norm(hidden[last], "model.norm.weight") @ self._weights["lm_head.weight"].T

    def _through_stage(
        self,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        segments: Sequence[Segment],
        kv: PagedPool,
    ) -> torch.Tensor:
        for layer in stage_layers(self.shape.layers, self._place):
            at = f"model.layers.{layer}."
            normed = self._norm(hidden, at + "input_layernorm.weight")
            hidden = hidden + self._summed(self._attention(normed, layer, rotation, segments, kv))
            normed = self._norm(hidden, at + "post_attention_layernorm.weight")
            hidden = hidden + self._summed(self._mlp(normed, at + "mlp."))
        return hidden

    def _attention(
        self,
        normed: torch.Tensor,
        layer: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        segments: Sequence[Segment],
        kv: PagedPool,
    ) -> torch.Tensor:
        at = f"model.layers.{layer}.self_attn."
        q, k, v = (self._heads(normed @ self._weights[f"{at}{part}_proj.weight"].T) for part in "qkv")
        q, k = _rotate(q, rotation), _rotate(k, rotation)
        attended, first = [], 0
        for segment in segments:
            own = slice(first, first + segment.n)
            kv.store(layer, segment.table, segment.start, k[own], v[own])
            attended.append(self._attend(q[own], *kv.load(layer, segment.table, 0, segment.start + segment.n)))
            first += segment.n
        return torch.cat(attended).flatten(1) @ self._weights[f"{at}o_proj.weight"].T

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        n_tokens, width = projected.shape
        return projected.view(n_tokens, width // self.shape.head_dim, self.shape.head_dim)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """`q`: the last n tokens of a sequence, `[n, query heads, dim]`; `k`, `v`: all, `[length, KV heads, dim]`."""
        if not q.shape[1]:
            return q
        n, length = q.shape[0], k.shape[0]
        seen = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
        k, v = k[:, self._kv_of_query].transpose(0, 1), v[:, self._kv_of_query].transpose(0, 1)
        return scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)

    def _mlp(self, normed: torch.Tensor, at: str) -> torch.Tensor:
        gate = silu(normed @ self._weights[at + "gate_proj.weight"].T)
        return (gate * (normed @ self._weights[at + "up_proj.weight"].T)) @ self._weights[at + "down_proj.weight"].T

    def _summed(self, partial: torch.Tensor) -> torch.Tensor:
        partial = partial.contiguous()
        self._group.sum(partial)
        return partial

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        single = hidden.cpu().float()
        normed = single * torch.rsqrt(single.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return self._weights[name] * normed.to(hidden)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None].float() * self._inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().double().to(self._device), angles.sin().double().to(self._device)


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotation
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
