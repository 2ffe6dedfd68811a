"""Dimension key of the project and the tensor annotations built on it.

The suffix of a tensor, the axis in its annotation and the variable that holds the size are the
same capital letter:

==== ==============================  ==== ==============================
B    rows of a batch                 T    query positions
S    key positions                   N    packed tokens
H    query heads                     J    key/value heads
D    head dimension                  E    model dimension
F    hidden dimension                V    vocabulary
M    matrix rows, or documents       K    reduction axis of a matrix
O    matrix outputs                  G    scale groups
R    packed rows                     C    columns of a scale table
A    draft anchors                   P    positions in a draft block
L    layers
==== ==============================  ==== ==============================

``"*M K"`` is any number of leading axes. A one-axis annotation starts with a space, ``" N"``.
"""

from jaxtyping import Bool, Float, Float8e4m3fn, Float32, Float64, Int, Int32, Int64, UInt8
from torch import Tensor

__all__ = [
    "Bool",
    "Float",
    "Float8e4m3fn",
    "Float32",
    "Float64",
    "Int",
    "Int32",
    "Int64",
    "Tensor",
    "UInt8",
]
