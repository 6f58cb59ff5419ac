"""What the fused losses over a vocabulary share: tiles of logits, their merge, and the walk backwards.

Operands come through the tensor memory accelerator; tiles and their order are fixed, so a row's bits do not
depend on how many rows there are.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from model.ops.tile import LOG2E, operand

ROWS, DEPTH, GROUP = 128, 64, 8
TILES = {"ROWS": ROWS, "DEPTH": DEPTH, "GROUP": GROUP, "num_warps": 8, "num_stages": 4}

# Elements of one chunk of logit gradients (bf16): 335 MB.
_CHUNK_ELEMENTS = 8192 * 20480


@triton.jit
def logit_tile(
    hidden,
    weight,
    count,
    tiles,
    first_column,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One [ROWS, COLUMNS] tile of hidden @ weight.T; GROUP row tiles in turn share a column tile."""
    program = tl.program_id(0)
    row_tiles = (count + ROWS - 1) // ROWS
    group = program // (GROUP * tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    row_tile = group * GROUP + program % (GROUP * tiles) % size
    column_tile = program % (GROUP * tiles) // size
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, K, DEPTH):
        x = operand(hidden.load([row_tile * ROWS, k]))
        w = operand(weight.load([first_column + column_tile * COLUMNS, k]))
        acc = tl.dot(x, tl.trans(w), acc)
    return acc, row_tile, column_tile


@triton.jit
def raised(top, m):
    """The larger maximum, and the factors that bring sums over exp(z - top) and exp(z - m) to it."""
    both = tl.maximum(top, m)
    return both, tl.exp2((top - both) * LOG2E), tl.exp2((m - both) * LOG2E)


def descriptors(hidden: Tensor, weight: Tensor, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of hidden states [T, d] and a head [V, d], for tiles of `columns` words."""
    return (
        TensorDescriptor.from_tensor(hidden, [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [columns, DEPTH]),
    )


def input_gradients(
    hidden: Tensor, weight: Tensor, columns: int, logit_gradients: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden [T, d] and weight [V, d], by chunks of the vocabulary, two products each.

    `logit_gradients(words, out)` gives those of the logits of `words`, whole tiles of `columns`, in a corner
    of `out`.
    """
    rows = max(1, len(hidden))
    chunk = max(columns, min(_CHUNK_ELEMENTS // rows, len(weight)) // columns * columns)
    buffer = torch.empty((len(hidden), chunk), dtype=hidden.dtype, device=hidden.device)
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    grad_weight = torch.empty_like(weight)
    for start in range(0, len(weight), chunk):
        words = slice(start, min(start + chunk, len(weight)))
        grad = logit_gradients(words, buffer)
        torch.mm(grad.T, hidden, out=grad_weight[words])
        grad_hidden += grad @ weight[words]
    return grad_hidden.to(hidden.dtype), grad_weight
