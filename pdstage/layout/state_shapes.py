"""Constructors for states that a request has once: convolution windows and SSM states.

`tensors` has the table of all constructors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

from pdstage.layout.arrays import Array, Naming, Part, Piece, Tensors, arrays_of, check_heads, part, refused
from pdstage.layout.topology import REPLICATED, Axis, Tp, shard_axis


class Section(NamedTuple):
    """Some of a conv state's channels: `heads` of the whole model, each `head_dim` channels.

    A rank holds the heads that `shard_range` gives it, or all if `replicated`. Channels without heads are cut into
    equal pieces, as many as every TP size on both sides divides.
    """

    name: str
    heads: int
    head_dim: int
    replicated: bool = False

    def unit(self) -> int:
        """Channels of one shard."""
        return self.heads * self.head_dim if self.replicated else self.head_dim

    def axis(self, tp: Tp) -> Axis:
        return REPLICATED if self.replicated else shard_axis("conv_head", self.heads, *tp)


def mamba_conv(
    states: Tensors,
    *,
    sections: Sequence[Section],
    tp: Tp,
    channels_last: bool = False,
    window: int | None = None,
    whole: bool = False,
    role: str = "conv",
    **naming: Unpack[Naming],
) -> Part:
    """Conv states `[slots, channels, rows]`, or `[slots, rows, channels]` if `channels_last`; component "mamba".

    `sections` divide the channels in order, `[q | k | v]` or `[x | B | C]`; each is sliced or replicated separately.
    The first `window` rows carry state (all if None), where the window is the kernel's width less one. Engines that
    decode speculatively keep more rows, which the other side need not have. Each row of the window is a view per
    section, so that the two memory orders match. With `whole` a section is one view, with longer runs if channels come
    first, and both sides must have the same order. Sources: SGLang's MambaPool (channels first; last for Kimi); vLLM's
    MambaSpec ("DS" and "SD"), where causal_conv1d leaves the state in the leading rows.
    """
    channel, row = (2, 1) if channels_last else (1, 2)
    axes = [section.axis(tp) for section in sections]
    roles: dict[str, list[Piece]] = {}
    for array in arrays_of("states", states, "slots, rows, channels" if channels_last else "slots, channels, rows"):
        rows, first = array.shape[row] if window is None else window, 0
        if not 1 <= rows <= array.shape[row]:
            raise refused(
                array.name, f"has {array.shape[row]} rows, not the {window} of window", "give the kernel's width less 1"
            )
        for section, axis in zip(sections, axes, strict=True):
            unit, step = section.unit(), array.strides[channel]
            base = Piece(
                array=array, at=first * step, n_items=array.shape[0], item_stride=array.strides[0],
                shard_stride=unit * step, segs=unit, seg_stride=step, width=array.itemsize, axis=axis,
            )  # fmt: skip
            first += unit * axis.count
            if not whole:
                pieces = {str(n): replace(base, at=base.at + n * array.strides[row]) for n in range(rows)}
            elif channels_last:
                width = unit * array.itemsize
                pieces = {"rows": replace(base, segs=rows, seg_stride=array.strides[row], width=width)}
            else:
                pieces = {"channels": replace(base, width=rows * array.itemsize)}
            for name, piece in pieces.items():
                roles.setdefault(f"{role}.{section.name}.{name}", []).append(piece)
        if first != array.shape[channel]:
            held = ", ".join(f"{s.name} {s.unit() * a.count}" for s, a in zip(sections, axes, strict=True))
            raise refused(
                array.name, f"has {array.shape[channel]} channels, this rank's sections {first} ({held})",
                "correct the sections or tp",
            )  # fmt: skip
    return part(roles, naming, component="mamba")


def mamba_ssm(
    states: Tensors,
    *,
    total_heads: int,
    tp: Tp,
    role: str = "ssm",
    **naming: Unpack[Naming],
) -> Part:
    """SSM states `[slots, heads, head_dim, state]` sliced by heads; component "mamba".

    Mamba-1's `[slots, channels, state]` works too: `total_heads` cuts the channels into equal pieces. Both sides must
    have the same order of the inner axes: another order takes another `role`, so that the two are refused. A state that
    every rank holds gets `tp=(1, 0)`. Sources: SGLang's MambaPool (temporal, ReplaySSM rings), vLLM's MambaSpec.
    """
    axis = shard_axis("ssm_head", total_heads, *tp)
    pieces = []
    for array in arrays_of("states", states, "slots, heads, head_dim, state", fewer=True):
        held = _by_heads(array, axis)
        (slots, _, rows, columns), (slot, head, row, _) = held.shape, held.strides
        pieces.append(
            Piece(
                array=array, n_items=slots, item_stride=slot, shard_stride=head, segs=rows, seg_stride=row,
                width=columns * array.itemsize, axis=axis,
            )
        )  # fmt: skip
    return part({role: pieces}, naming, component="mamba")


def _by_heads(array: Array, axis: Axis) -> Array:
    """`[slots, heads, a, b]`; heads and a may be one axis of channels."""
    if len(array.shape) == 3:
        channels, step = array.shape[1], array.strides[1]
        if channels % axis.count:
            raise refused(array.name, f"has {channels} channels for {axis.count} heads", "correct total_heads or tp")
        dim = channels // axis.count
        shape, strides = array.shape, array.strides
        return array.seen((shape[0], axis.count, dim, shape[2]), (strides[0], dim * step, step, strides[2]))
    check_heads(array, array.shape[1], axis)
    return array


def slot_states(states: Tensors, *, role: str = "state", **naming: Unpack[Naming]) -> Part:
    """States `[slots, ...]` that every rank holds and that are transferred whole: request rows, pending groups,
    convolutions of replicated layers. The default component is "request_row"; a component of no registered kind must be
    listed in `build`'s `slots`.
    """
    roles = {
        role: [
            Piece(
                array=array, n_items=array.shape[0], item_stride=array.strides[0], width=array.dense_nbytes(1),
                axis=REPLICATED,
            )
            for array in arrays_of("states", states, "slots, ...")
        ]
    }  # fmt: skip
    return part(roles, naming, component="request_row")
