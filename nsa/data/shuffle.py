"""A shuffle that is computed, not stored: any position is available at once."""

from __future__ import annotations

MASK = 2**64 - 1
FEISTEL_ROUNDS = 4


def mix(*values: int) -> int:
    """A 64-bit hash of integers: the finalizer of splitmix64, once per value. The same on every machine."""
    x = 0
    for value in values:
        x = (x + value + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x


class Permutation:
    """`range(n)` in an order that the key determines, by a Feistel network, which takes no memory."""

    def __init__(self, n: int, *key: int) -> None:
        self.n = n
        self.half = max(1, ((n - 1).bit_length() + 1) // 2)
        self.keys = [mix(*key, index) for index in range(FEISTEL_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        # The network permutes the next power of four; repeating it until it lands inside permutes `range(n)`.
        index = self.network(index)
        while index >= self.n:
            index = self.network(index)
        return index

    def network(self, index: int) -> int:
        low_bits = (1 << self.half) - 1
        left, right = index >> self.half, index & low_bits
        for key in self.keys:
            left, right = right, left ^ (mix(key, right) & low_bits)
        return left << self.half | right
