"""Which layers read each other's channels through operations that a scale per channel, or a shift, passes.

A positive factor passes what is positively homogeneous and keeps channels apart: ReLU, LeakyReLU, PReLU, pools, means over positions,
flattening, resizing. ReLU6 is not; the clips on the way are noted. A shift needs more: padding with zeros would not shift along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, fx, nn

from qat.fold.base import built_in_activation
from qat.graph.kinds import describe, keeps_scale, module_of
from qat.ptq.layer import Layer
from qat.ptq.passing import (
    ALONE,
    BENT,
    HOMOGENEOUS,
    RELUS,
    channel_axis,
    is_homogeneous,
    is_named,
    is_relu6,
    is_relu6_module,
    moved_channels,
    no_shift_into,
    no_shift_through,
    reads_shape,
)


@dataclass(eq=False)
class Link:
    """`second` reads nothing but `first`, channel by channel.

    Attributes:
        repeat: inputs of `second` that are made of each channel of `first`, one behind the other (flattened positions).
        clips: nodes on the way that are ReLU6; the node of the BatchNorm stands for one built into it.
        gives_zero: an activation on the way leaves no negative values.
        bounded: in front of the clips no value gets larger than the layer gave it.
        no_shift: why a shift of the channels does not pass, or None.
    """

    first: Layer
    second: Layer
    repeat: int = 1
    clips: list[fx.Node] = field(default_factory=list)
    gives_zero: bool = False
    bounded: bool = True
    no_shift: str | None = None

    @property
    def name(self) -> str:
        return f"{self.first.name} -> {self.second.name}"


def links_of(graph: fx.GraphModule, layers: dict[fx.Node, Layer]) -> tuple[list[Link], list[tuple[str, str]]]:
    """The links in graph order, and pairs (layer, what its output meets instead of another layer)."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    links: list[Link] = []
    left: list[tuple[str, str]] = []
    for layer in layers.values():
        found = _follow(layer, layers, modules)
        if isinstance(found, Link):
            links.append(found)
        else:
            left.append((layer.name, found))
    return links, left


def _follow(layer: Layer, layers: dict[fx.Node, Layer], modules: dict[str, nn.Module]) -> Link | str:
    node, axis, repeat = layer.end, channel_axis(layer, layer.end), 1
    clips: list[fx.Node] = []
    gives_zero, grows, bounded, no_shift = False, False, True, None
    inside = built_in_activation(layer.bn)
    for part in inside if isinstance(inside, nn.Sequential) else (inside,):
        gives_zero, grows = gives_zero or isinstance(part, nn.ReLU), grows or isinstance(part, BENT)
        if is_relu6_module(part):
            clips.append(node)
            bounded = bounded and not grows
        elif not isinstance(part, (*HOMOGENEOUS, nn.Identity)) and not is_named(part, ALONE):
            return f"its BatchNorm's activation ({type(part).__name__}) is not positively homogeneous"
    while True:
        readers = [user for user in node.users if not reads_shape(user)]
        if len(readers) != 1:
            return f"its output is read by {', '.join(describe(user, modules) for user in readers)}"
        (reader,) = readers
        if reader.op == "output":
            return "its output is the network's"
        if reader.all_input_nodes[0] is not node or (reader.args and reader.args[0] is not node):
            return f"its output is not the first input of {describe(reader, modules)}"
        second = layers.get(reader)
        if second is not None:
            if axis != channel_axis(second, node):
                return f"its channels are not those that '{second.name}' reads"
            return Link(layer, second, repeat, clips, gives_zero or bool(clips), bounded, no_shift or no_shift_into(second))
        gives_zero = gives_zero or isinstance(module_of(reader, modules), nn.ReLU) or reader.target in RELUS
        if is_relu6(reader, modules):
            clips.append(reader)
            bounded = bounded and not grows
        elif not is_homogeneous(reader, modules):
            moved = moved_channels(reader, node, axis, modules)
            if moved is None:
                return f"its output is read by {describe(reader, modules)}"
            axis, repeat = moved[0], repeat * moved[1]
            no_shift = no_shift or no_shift_through(reader, modules)
        grows = grows or not (keeps_scale(reader, modules) or (gives_zero and is_homogeneous(reader, modules)))
        node = reader


def spread(values: Tensor, repeat: int) -> Tensor:
    """A value per channel (C) as one per feature (C repeat), in the order of flattening."""
    return values.repeat_interleave(repeat)
