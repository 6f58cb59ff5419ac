"""The floating-point arithmetic of a compiled kernel, read from its PTX.

Two kernels give the same bits when they round the same expressions: the same operations in the same order,
with the same additions fused to multiplications. Expressions are written with `x` for whatever is loaded,
selected or comes out of a matrix product, and `m` for the larger or smaller of two values, which is not
rounded: so kernels of other tiles and layouts can be compared. Which elements a thread adds up an expression
does not say; `sums` reads that from the layouts.
"""

import re
from collections import Counter

_UNARY = "neg|abs|ex2|lg2|rcp|rsqrt|sqrt"
_BINARY = "add|sub|mul|max|min|div"
_OPERATION = re.compile(rf"({_UNARY}|{_BINARY}|fma)\.(?:\w+\.)*f32$")
_INSTRUCTION = re.compile(r"(?:@!?%\w+ )?([a-z][\w.:]*)\s+(.*);")
_ARGUMENTS = re.compile(r",(?![^\[{]*[\]}])")
_REGISTER = re.compile(r"%[a-z]+\d+")
_LEAF, _ZERO, _MINUS_ZERO, _ONE = "x", "0f00000000", "0f80000000", "0f3F800000"
_CONSTANT = re.compile(r"0f[0-9A-Fa-f]{8}$|-?\d+$")
_REDUCTION = re.compile(
    r'"tt\.reduce"\(.*?axis = (\d+).*?\}\) : \(tensor<([\dx]+)xf32, (#\w+)>\) ->', re.DOTALL
)


def instructions(ptx: str) -> list[tuple[str, list[str]]]:
    """Operation and operands of each instruction, in the order of the text."""
    found = (_INSTRUCTION.match(line.strip()) for line in ptx.splitlines())
    return [(m[1], [a.strip() for a in _ARGUMENTS.split(m[2])]) for m in found if m]


def _power_of_two(constant: str) -> bool:
    return constant.startswith("0f") and constant != _ZERO and int(constant[2:], 16) & 0x807FFFFF == 0


def _joined(operation: str, operands: list[str]) -> str:
    """An expression in a form that does not depend on what rounding does not depend on."""
    if operation in ("max", "min"):
        return "m"
    if operation in ("add", "mul"):
        operands = sorted(operands)
    if operation == "fma":
        operands = [*sorted(operands[:2]), operands[2]]
    if operation == "mul" and _power_of_two(operands[0]):
        return operands[1]
    if operation in ("add", "fma") and operands[0] == _MINUS_ZERO:
        return operands[-1]
    if operation == "sub" and operands[0] == _ZERO:
        operation, operands = "neg", operands[1:]
    return f"{operation}({','.join(operands)})"


def _selected(first: str, second: str) -> str:
    """Of two values: padding says nothing of the arithmetic."""
    plain = [value == _LEAF or _CONSTANT.match(value) is not None for value in (first, second)]
    if all(plain):
        return _LEAF
    if any(plain):
        return second if plain[0] else first
    return f"sel({','.join(sorted((first, second)))})"


def rounded(ptx: str) -> set[str]:
    """Expressions of all values that a kernel rounds to bf16 or stores as they are."""
    known: dict[str, str] = {}
    roots: set[str] = set()

    def value(operand: str) -> str:
        operand = operand.strip("{} ")
        if operand == _ONE:
            return _LEAF
        return operand if _CONSTANT.match(operand) else known.get(operand, _LEAF)

    for name, operands in instructions(ptx):
        operation = _OPERATION.match(name)
        if operation:
            known[operands[0]] = _joined(operation[1], [value(x) for x in operands[1:]])
        elif name.startswith("shfl"):
            lane = operands[2] if _CONSTANT.match(operands[2]) else _LEAF
            known[operands[0].split("|")[0]] = f"shfl({value(operands[1])},{lane})"
        elif name in ("mov.b32", "mov.f32"):
            copied, before = value(operands[1]), known.get(operands[0], _LEAF)
            # What a path around a loop leaves there is padding.
            known[operands[0]] = copied if "(" in copied or "(" not in before else before
        elif name.startswith("selp"):
            known[operands[0]] = _selected(value(operands[1]), value(operands[2]))
        elif name.startswith("cvt.rn.bf16"):
            roots.update(value(x) for x in operands[1:])
            known[operands[0]] = _LEAF
        elif name.startswith("st."):
            roots.update(value(x) for x in _REGISTER.findall(operands[1]))
        else:
            known.update((x, _LEAF) for x in _REGISTER.findall(operands[0]))
    return {root for root in roots if "(" in root}


def outermost(roots: set[str], operation: str) -> set[str]:
    """The largest expressions of `operation` within roots."""
    found = set()
    for root in roots:
        at = 0
        while (at := root.find(operation + "(", at)) >= 0:
            depth, end = 0, root.index("(", at)
            while True:
                depth += {"(": 1, ")": -1}.get(root[end], 0)
                end += 1
                if not depth:
                    break
            found.add(root[at:end])
            at = end
    return found


def sum_of(terms: int) -> str:
    """The expression of a sum of `terms` values that begins with zero, in order."""
    total = _ZERO
    for _ in range(terms):
        total = _joined("add", [total, _LEAF])
    return total


def left_to_fuse(ptx: str) -> list[str]:
    """Additions that the assembler may fuse with a multiplication, as it likes: of each the instruction.

    Those of a register that a loop carries are left out: what is multiplied before a loop is not fused in it.
    """
    listed = instructions(ptx)
    writes = Counter(operands[0] for name, operands in listed if not name.startswith("st."))
    multiplied = (operands[0] for name, operands in listed if name in ("mul.f32", "mul.ftz.f32"))
    products = {register for register in multiplied if writes[register] == 1}
    products |= {operands[0] for name, operands in listed if name == "neg.f32" and operands[1] in products}
    return [
        f"{name} {', '.join(operands)}"
        for name, operands in listed
        if name in ("add.f32", "sub.f32", "add.ftz.f32", "sub.ftz.f32") and products & set(operands[1:])
    ]


def fused(ptx: str) -> list[str]:
    """Additions fused with a multiplication, but for those of library functions, which flush to zero."""
    return [f"{name} {', '.join(x)}" for name, x in instructions(ptx) if name == "fma.rn.f32"]


Elements = tuple[int, tuple[tuple[int, ...], ...]]
"""Of a sum: how many, and the steps along them between a thread's values, lanes, and warps."""


def sums(ttgir: str) -> set[Elements]:
    """Which elements each sum of fp32 adds up where: in a thread, then over lanes, then over warps.

    Raises:
        ValueError: a layout of a kind that is not known here.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.(.*)$", ttgir, re.MULTILINE))
    found = set()
    for match in _REDUCTION.finditer(ttgir):
        axis, sizes = int(match[1]), [int(size) for size in match[2].split("x")]
        if "arith.addf" in match[0]:
            found.add((sizes[axis], _steps(layouts[match[3]], axis, sizes[axis])))
    return found


def _steps(layout: str, axis: int, size: int) -> tuple[tuple[int, ...], ...]:
    kind, numbers = layout.split("<")[0], dict(re.findall(r"(\w+) = (\[[^=]*\])(?:, |\})", layout))
    if kind == "linear":
        bases = (re.findall(r"\[([\d, ]+)\]", numbers[name]) for name in ("register", "lane", "warp"))
        return tuple(tuple(n for b in part if (n := int(b.split(",")[axis]))) for part in bases)
    along = {name: int(value.strip("[]").split(",")[axis]) for name, value in numbers.items()}
    if kind == "blocked":
        lane, warp = along["sizePerThread"], along["sizePerThread"] * along["threadsPerWarp"]
        again = warp * along["warpsPerCTA"]
        return (
            _powers(1, lane) + _powers(again, size),
            _powers(lane, min(warp, size)),
            _powers(warp, min(again, size)),
        )
    if kind == "nvidia_mma" and axis == 1 and along["warpsPerCTA"] == 1:
        return (1, *_powers(8, size)), (2, 4), ()
    raise ValueError(f"which elements a thread holds is not known of the layout {layout}")


def _powers(first: int, end: int) -> tuple[int, ...]:
    return tuple(1 << n for n in range(first.bit_length() - 1, end.bit_length() - 1))
