"""The cache of one NSA layer in pages, which a serving engine can own: rows take memory as they grow.

A page holds the selected branch's keys and values of `page_size` tokens, and beside them the compressed blocks that
start in these tokens: one table addresses both. The two rings (sliding window and raw tail) have a fixed size per row
and are not paged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.cache.layer import NSACache
from nsa.cache.store import PagedStore, Store, bits
from nsa.checks import check_tensor
from nsa.config import NSAConfig, require, require_int, require_positive_int


class PagedNSACache(NSACache):
    """An `NSACache` whose rows hold only the pages they were given.

    Pages are given by `allocate` and taken back by `free`, or a serving engine keeps its own list and sets
    `set_page_table`. A row's tokens must fit into its pages: a step that needs more raises, and in a static cache the
    tokens that do not fit are dropped. `grow` adds no pages.

    Args:
        config, batch_size, options: As for `NSACache`.
        max_len: Most tokens per row: the width of the page table.
        page_size: Tokens per page, a multiple of the compression stride `d`.
        n_pages: Pages of all rows together. Default: enough for every row to reach `max_len`.

    Raises:
        ValueError: An argument has a wrong type or value.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch_size: int,
        max_len: int,
        *,
        page_size: int = 64,
        n_pages: int | None = None,
        **options: Any,
    ) -> None:
        require_positive_int("page_size", page_size)
        self.page_size, self.n_pages = page_size, 0 if n_pages is None else n_pages
        if n_pages is not None:
            require_positive_int("n_pages", n_pages)
        super().__init__(config, batch_size, max_len, **options)

    def new_stores(self) -> tuple[Store, Store]:
        stride, columns = self.config.d, -(-self.max_len // self.page_size)
        require(self.page_size % stride == 0, "page_size", self.page_size, f"a multiple of the stride d = {stride}")
        self.n_pages = self.n_pages or self.batch_size * columns
        # What the host knows of the table: the pages of each row, in order.
        self.pages: list[list[int]] = [[] for _ in range(self.batch_size)]
        # An entry without a page is the spare one, so that every read and write stays inside.
        self.table = torch.full((self.batch_size, columns), self.n_pages, dtype=torch.int32, device=self.device)
        self.row_capacity = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        fp8 = self.quantize == "fp8"
        selected, compressed = (
            PagedStore(self.config, (self.n_pages + 1, n), self.dtype, self.device, table=self.table, fp8=fp8)
            for n in (self.page_size, self.page_size // stride)
        )
        return selected, compressed

    @property
    def page_table(self) -> Tensor:
        """int32 `[B, columns]` on the CPU: the page of each `page_size` tokens of a row, -1 for none."""
        return table_of(self.pages, self.table.shape[1], none=-1)

    @property
    def free_pages(self) -> int:
        """How many pages no row holds."""
        return self.n_pages - sum(map(len, self.pages))

    @property
    def capacity(self) -> Tensor:
        return self.row_capacity

    def capacities(self, pages: Sequence[Sequence[int]], max_len: int | None = None) -> list[int]:
        return [min(len(row) * self.page_size, max_len or self.max_len) for row in pages]

    def least_capacity(self) -> int:
        return min(self.capacities(self.pages))

    def check_fit(self, lengths: list[int]) -> None:
        super().check_fit(lengths)
        for row, (length, capacity) in enumerate(zip(lengths, self.capacities(self.pages), strict=True)):
            accepted = f"at most the {capacity} that its {len(self.pages[row])} pages hold: allocate more"
            require(length <= capacity, f"the new length of row {row}", length, accepted)

    def allocate(self, lengths: int | Sequence[int]) -> None:
        """Give every row the pages for `lengths` tokens in all; a row that has as many keeps what it has.

        Args:
            lengths: One number for all rows, or one per row, each at most `max_len`.

        Raises:
            ValueError: `lengths` is no such number, or there are not enough free pages. No row was given any.
        """
        wanted = list(lengths) if isinstance(lengths, Sequence) else [lengths] * self.batch_size
        require(len(wanted) == self.batch_size, "lengths", lengths, f"one number, or {self.batch_size} of them")
        for row, length in enumerate(wanted):
            require_int(f"lengths[{row}]", length, at_least=0)
            require(length <= self.max_len, f"lengths[{row}]", length, f"at most max_len = {self.max_len}")
        missing = [max(0, -(-n // self.page_size) - len(row)) for n, row in zip(wanted, self.pages, strict=True)]
        free = self.free_list()
        require(sum(missing) <= len(free), "pages to allocate", sum(missing), f"at most the {len(free)} free ones")
        self.set_pages([row + [free.pop(0) for _ in range(n)] for row, n in zip(self.pages, missing, strict=True)])

    make_room = allocate

    def free(self, rows: Tensor | None = None) -> None:
        """Empty rows and take back their pages.

        Args:
            rows: As for `reset`.

        Raises:
            ValueError: `rows` is no such tensor.
        """
        freed = range(self.batch_size) if rows is None else self.check_rows(rows).tolist()
        self.reset(rows)
        self.set_pages([[] if row in freed else pages for row, pages in enumerate(self.pages)])

    def set_page_table(self, table: Tensor) -> None:
        """Use a page table that a serving engine keeps; what its pages hold is taken as the rows' content.

        Args:
            table: int32 `[batch_size, n]` with `n` up to the number of columns, best on the CPU: its values are read. A
                row's pages come first, -1 follows.

        Raises:
            ValueError: `table` has a wrong dtype or shape, a page out of range, a page in two places, a page after -1,
                or too few pages for a row's length. The cache is as it was.
        """
        check_tensor("table", table, "B n", (torch.int32,), "int32")
        columns = self.table.shape[1]
        fits = table.shape[0] == self.batch_size and table.shape[1] <= columns
        require(fits, "table.shape", tuple(table.shape), f"({self.batch_size}, at most {columns})")
        pages: list[list[int]] = []
        owner: dict[int, int] = {}
        for row, entries in enumerate(table.tolist()):
            used = entries[: entries.index(-1)] if -1 in entries else entries
            for page in entries:
                inside = -1 <= page < self.n_pages
                require(inside, f"table[{row}]", page, f"pages 0 to {self.n_pages - 1}, or -1 for none")
            holes = len(used) == sum(page != -1 for page in entries)
            require(holes, f"table[{row}]", entries, "no page after -1")
            for page in used:
                shared = f"each page once; rows {owner.get(page)} and {row} hold page {page}"
                require(page not in owner, f"table[{row}]", entries, shared)
                owner[page] = row
            pages.append(used)
        for row, (length, capacity) in enumerate(zip(self.lengths.tolist(), self.capacities(pages), strict=True)):
            require(capacity >= length, f"table[{row}]", pages[row], f"pages for the {length} tokens of the row")
        self.set_pages(pages)

    def free_list(self) -> list[int]:
        held = {page for row in self.pages for page in row}
        return [page for page in range(self.n_pages) if page not in held]

    def new_table(
        self, pages: list[list[int]], *, max_len: int | None = None, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """The table of `pages` and the rows' capacities, by default for the `max_len` and on the device of now."""
        columns = self.table.shape[1] if max_len is None else -(-max_len // self.page_size)
        with torch.inference_mode(False):
            table = table_of(pages, columns, none=self.n_pages)
            capacity = torch.tensor(self.capacities(pages, max_len), dtype=torch.int32)
            return table.to(device or self.device), capacity.to(device or self.device)

    def set_pages(self, pages: list[list[int]], new: tuple[Tensor, Tensor] | None = None) -> None:
        """Use `pages` and their `new_table`; in place where its form allows: a captured step reads the new one."""
        table, capacity = new or self.new_table(pages)
        self.pages = pages
        if (table.shape, table.device) == (self.table.shape, self.table.device):
            self.table.copy_(table)
            self.row_capacity.copy_(capacity)
            return
        self.table, self.row_capacity = table, capacity
        for store in (self.selected, self.compressed):
            assert isinstance(store, PagedStore)
            store.table = table

    def row_stores(self) -> Iterable[Store]:
        return self.tail, self.window

    def buffers(self) -> tuple[Tensor, ...]:
        paged = (*self.compressed.tensors(), *self.selected.tensors())
        return (*paged, *self.row_tensors(), self.table, self.row_capacity)

    @torch.no_grad()
    def select(self, rows: Tensor) -> None:
        """As `NSACache.select`. A repeated row is copied to free pages, and rows that are dropped give theirs back.

        Args:
            rows: As for `NSACache.select`.

        Raises:
            ValueError: `rows` is no such tensor, or there are not enough free pages; the cache is as it was.
        """
        index = self.check_rows(rows).tolist()
        dropped = [page for row in set(range(self.batch_size)) - set(index) for page in self.pages[row]]
        free = sorted(self.free_list() + dropped)
        n_copies = sum(len(self.pages[row]) for i, row in enumerate(index) if row in index[:i])
        require(n_copies <= len(free), "pages to copy rows to", n_copies, f"at most the {len(free)} free ones")
        pages: list[list[int]] = []
        source: list[int] = []
        for i, row in enumerate(index):
            repeated = row in index[:i]
            pages.append([free.pop(0) for _ in self.pages[row]] if repeated else self.pages[row])
            source += self.pages[row] if repeated else []
        target = [page for i, row in enumerate(index) if row in index[:i] for page in pages[i]]
        # All that allocates comes first.
        read, written = (torch.tensor(x, dtype=torch.long, device=self.device) for x in (source, target))
        paged = [bits(x) for store in (self.selected, self.compressed) for x in store.tensors()]
        copies, table = [x[read] for x in paged], self.new_table(pages)
        super().select(rows)
        for x, copy in zip(paged, copies, strict=True):
            x[written] = copy
        self.set_pages(pages, table)

    def enlarge(self, max_len: int) -> None:
        # The table becomes wider; no pages are added.
        table = self.new_table(self.pages, max_len=max_len)
        super().enlarge(max_len)
        self.set_pages(self.pages, table)

    def move(self, device: torch.device | str) -> None:
        table = self.new_table(self.pages, device=device)
        super().move(device)
        self.set_pages(self.pages, table)


def table_of(pages: Sequence[Sequence[int]], columns: int, *, none: int) -> Tensor:
    return torch.tensor([[*row, *[none] * (columns - len(row))] for row in pages], dtype=torch.int32)
