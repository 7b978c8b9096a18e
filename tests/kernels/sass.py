"""Reads a kernel's machine code for two things that ptxas does without a word.

It gives away registers that a later iteration reads (ptxas 12.8). A Hopper product takes its left operand from four
registers. Where a loop computes it from something it loaded before the loop, as `q` in `q k^T`, those registers must
last; ptxas 12.8 was seen to write `p` of `p v` into them, so that every iteration but the first multiplied by the wrong
matrix, with no word and the same result each time. Our kernels carry no left operand from one iteration to the next, so
the sign is plain: a register that a product reads, that nothing in the loop writes before it, and that something in the
loop writes after it.

It serializes products (warning C7513, which Triton throws away). A dot is several products that run one behind the
other and are waited for once; where ptxas finds another instruction between them that defines one of their registers,
every product gets a wait of its own, and nothing overlaps with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+)\s*([^;]*);")
REGISTER = re.compile(r"R(\d+)(?:\.reuse)?$")
PREDICATE = re.compile(r"!?U?P[T\d]$")
# Instructions whose first register is read, not written, and those that write predicates alone.
WRITES_NOTHING = ("ST", "RED", "BAR", "BRA", "SYNCS", "UTMA", "R2UR", "ISETP", "FSETP", "PLOP", "WARPGROUP")
LEFT_OPERAND = 4


@dataclass(frozen=True)
class Instruction:
    address: int
    condition: str
    name: str
    operands: tuple[str, ...]

    def register(self, i: int) -> int | None:
        found = REGISTER.match(self.operands[i]) if i < len(self.operands) else None
        return int(found[1]) if found else None

    @property
    def left_operand(self) -> set[int]:
        """Registers of a product's left operand, if it is in registers."""
        first = self.register(1) if self.name.startswith("HGMMA") else None
        return set() if first is None else set(range(first, first + LEFT_OPERAND))

    @property
    def written(self) -> set[int]:
        if self.name.startswith(WRITES_NOTHING) or not self.operands:
            return set()
        # A shuffle's or a load's first operand may be a predicate.
        first = self.register(1 if PREDICATE.match(self.operands[0]) else 0)
        return set() if first is None else set(range(first, first + self.width))

    @property
    def width(self) -> int:
        """Registers that the result takes."""
        product = re.match(r"HGMMA\.64x(\d+)x", self.name)
        if product:
            return int(product[1]) // 2
        matrices = re.match(r"LDSM\..*\.(\d)$", self.name)
        if matrices:
            return int(matrices[1])
        if ".128" in self.name:
            return 4
        return 2 if ".64" in self.name or ".WIDE" in self.name else 1


def instructions(sass: str) -> list[Instruction]:
    return [
        Instruction(int(address, 16), condition, name, tuple(operand.strip() for operand in operands.split(",")))
        for address, condition, name, operands in INSTRUCTION.findall(sass)
    ]


def loops(code: list[Instruction]) -> list[list[Instruction]]:
    """From the target of each conditional jump backwards to the jump. Code that waits lies at the end, and jumps back
    from there without a condition."""
    at = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for i, instruction in enumerate(code):
        if not instruction.condition or not instruction.name.startswith("BRA"):
            continue
        target = re.search(r"0x([0-9a-f]+)", instruction.operands[-1])
        start = at.get(int(target[1], 16), i) if target else i
        if start < i:
            found.append(code[start : i + 1])
    return found


def overwritten(sass: str) -> list[str]:
    """Products whose left operand the next iteration no longer finds."""
    found = []
    for body in loops(instructions(sass)):
        first: dict[int, int] = {}
        for i, instruction in enumerate(body):
            for register in instruction.written:
                first.setdefault(register, i)
        for i, product in enumerate(body):
            lost = [register for register in product.left_operand if first.get(register, -1) >= i]
            if lost:
                found.append(f"{product.name} at {product.address:#x}: R{min(lost)} is written later in the loop")
    return found


def products_and_waits(sass: str) -> tuple[int, int]:
    """How many products a kernel has, and how many waits for them."""
    names = [instruction.name for instruction in instructions(sass)]
    return sum(name.startswith("HGMMA") for name in names), sum(name.startswith("WARPGROUP.DEPBAR") for name in names)


def serialized(products: int, waits: int) -> bool:
    """Whether more than half of the products have a wait of their own. A dot of our kernels is four of them or more."""
    return 2 * waits > products
