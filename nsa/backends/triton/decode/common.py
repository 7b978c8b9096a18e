"""What the decode kernels share: rows of a step, split-KV partials, and a softmax whose rescaling is exact.

Rows. A step has `T` new tokens per batch row; the `h` heads of a group and the `T` tokens are flattened into
`ROWS = T * h` rows `r = t * h + head`, which read the same keys.

Partials. Each CTA covers one split of the keys of one (batch row, group) and leaves, per row, an unnormalized output,
a maximum and a sum in a slot of `partial_o [B*G, SLOTS, ROWS, Dv]`, `partial_m`, `partial_l [B*G, SLOTS, ROWS]`. A
split that a row has not reached has sum 0 and a maximum below all others; its output is not written.

Stores. A store `[B, places, G, D]` is contiguous, or with a table `[pages, PAGE, G, D]`: row `b` then has its places
`i * PAGE` to `(i + 1) * PAGE` in page `table[b, i]`. In fp8 it holds the bytes of e4m3, and `scale [B, places, G]`
beside it what they are multiplied by. `place_of`, `load_tokens` and `store_row` alone know of this.

Programmatic dependent launch. On GPUs that have it (`PDL`), a launch starts while the one before it runs, and waits
for its results. If the launch after it waits likewise, it triggers that one before it waits (`trigger_then_wait`). If
not, because that one waits by counters, it triggers it afterwards (`wait_then_trigger`): when that one starts, all that
comes before the two is complete. Rows' lengths and `counts` are read without waiting: the launch before a step's first
one must not write them.

Counters. `arrivals [B*G, 3]`, zero before the step, count the CTAs of the first three launches of the attention that
are done with a batch row and group. A launch waits for its own batch row and group alone; when it starts, all CTAs of
the one before it have started, because each of them has let it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nsa.backends.triton.primitives import FLOOR


@triton.jit
def wait_then_trigger(PDL: tl.constexpr):
    """Wait for the launch before this one, then trigger the next one."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def trigger_then_wait(PDL: tl.constexpr):
    """Trigger the next launch, then wait for the one before this one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def arrive(counter):
    """Tell those who wait at `counter` that all which this CTA stored can be read."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def wait_for(counter, count):
    """Until `count` CTAs have arrived. All of them must be running by then, or they may never get the room to."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass
    tl.debug_barrier()


# Maximum of a row that has seen no key: above FLOOR by more than a power of two can tell.
NONE_SEEN = tl.constexpr(-0.5e30)
# Added to a number and taken away again, it leaves a whole one; the sum's low bits are the integer.
TO_WHOLE = tl.constexpr(12582912.0)


@triton.jit
def power_of_2(b_x):
    """`2^x` of whole numbers `x` up to 0 in fp32, exact; 0 below the normal numbers."""
    b_exponent = (tl.maximum(b_x, -127.0) + TO_WHOLE).to(tl.int32, bitcast=True) + 127
    return (b_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def exact_softmax(b_s, m_seen, b_m, b_l, b_o):
    """Online softmax in base 2 whose maximum is a whole number, so that rescaling changes no mantissa.

    Takes in scores `b_s` where `m_seen`; returns probabilities relative to the new maximum, then maximum, sum and
    output rescaled to it. A probability's mantissa depends on its score alone: equal scores tie in every tile.
    """
    b_s = tl.where(m_seen, b_s, FLOOR)
    b_whole = (b_s + TO_WHOLE) - TO_WHOLE
    b_m_new = tl.maximum(b_m, tl.max(b_whole, 1))
    b_p = tl.math.exp2(b_s - b_whole) * power_of_2(b_whole - b_m_new[:, None])
    b_alpha = power_of_2(b_m - b_m_new)
    return b_p, b_m_new, b_l * b_alpha + tl.sum(b_p, 1), b_o * b_alpha[:, None]


@triton.jit
def position_of(start, i_b, o_t, last):
    """Position of the step's token `o_t`. Padding, and a token that does not fit into the cache, is moved to `last`,
    the row's last position: what is computed for it is discarded, but must not read what was never written."""
    return tl.minimum(tl.load(start + i_b) + o_t, last)


@triton.jit
def last_of(start, counts, limits, i_b, max_len, T: tl.constexpr):
    """The last position of the row after the step, see `end_of`; 0 in an empty row."""
    return tl.maximum(end_of(start, counts, limits, i_b, max_len, T) - 1, 0)


@triton.jit
def end_of(start, counts, limits, i_b, max_len, T: tl.constexpr):
    """How long the row is after the step, of whose tokens the first `counts[b]` are real; all without `counts`. At most
    `limits[b]`, if the row has a limit of its own."""
    n_new = T
    if counts is not None:
        n_new = tl.load(counts + i_b).to(tl.int32)
    end = tl.minimum(tl.load(start + i_b) + n_new, max_len)
    if limits is not None:
        end = tl.minimum(end, tl.load(limits + i_b))
    return end


@triton.jit
def cosine_and_sine(b_position, b_frequency):
    """Of `position * frequency`: integers, and fp64. Whole turns are dropped in fp64; the rest is below pi, and fp32 is
    exact enough for it."""
    b_turns = b_position.to(tl.float64) * b_frequency * 0.15915494309189535
    b_angle = ((b_turns - tl.floor(b_turns + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(b_angle), tl.sin(b_angle)


@triton.jit
def load_step_rows(
    q, i_b, i_g, o_r, stride_b, stride_t, stride_h,
    H: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`[len(o_r), BLOCK_D]` of `q [B, T, Hq, D]`; zeros for rows past the last."""
    o_d = tl.arange(0, BLOCK_D)
    o_t = o_r // H
    o_row = o_t * stride_t + (i_g * H + o_r - o_t * H) * stride_h
    p_q = q + i_b.to(tl.int64) * stride_b + o_row[:, None] + o_d[None, :]
    return tl.load(p_q, mask=(o_r < ROWS)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def place_of(table, i_b, o_n, m_n, columns, stride_b, stride_n, PAGE: tl.constexpr):
    """Offsets (int64) of rows `i_b` in a store, and of places `o_n` from there; with a table, `stride_b` is that of a
    page."""
    if table is None:
        o_b = i_b.to(tl.int64) * stride_b
        o_x = o_n.to(tl.int64) * stride_n
    else:
        o_b = 0
        b_page = tl.load(table + i_b.to(tl.int64) * columns + o_n // PAGE, mask=m_n, other=0)
        o_x = b_page.to(tl.int64) * stride_b + (o_n % PAGE) * stride_n
    return o_b, o_x


@triton.jit
def load_tokens(
    x, scale, table, i_b, i_g, o_n, m_n, columns, stride_b, stride_n, stride_g,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`[len(o_n), BLOCK_D]` keys or values at places `o_n` of one row and group, zeros where `m_n` is false."""
    o_d = tl.arange(0, BLOCK_D)
    o_b, o_x = place_of(table, i_b, o_n, m_n, columns, stride_b, stride_n, PAGE)
    o_b += i_g * stride_g
    p_x = x + o_b + o_x[:, None] + o_d[None, :]
    if D < BLOCK_D:
        b_x = tl.load(p_x, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)
    else:
        b_x = tl.load(p_x, mask=m_n[:, None], other=0.0)
    if scale is not None:
        b_x = from_fp8(b_x, tl.load(scale + o_b // D + o_x // D, mask=m_n, other=0.0)[:, None], DTYPE)
    return b_x


@triton.jit
def from_fp8(b_bytes, b_scale, DTYPE: tl.constexpr):
    """Values of e4m3 bytes times `b_scale`. Their bits are those of fp16 with a smaller bias, so that no GPU needs to
    know e4m3; its NaN has a scale that is NaN."""
    b_bits = ((b_bytes & 0x80).to(tl.uint16) << 8) | ((b_bytes & 0x7F).to(tl.uint16) << 7)
    return (b_bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0 * b_scale).to(DTYPE)


@triton.jit
def to_fp8(b_x, b_scale):
    """`b_x / b_scale` (fp32) as the nearest e4m3 bytes, ties to even, as torch rounds."""
    b_bits = tl.div_rn(b_x, tl.where(b_scale > 0, b_scale, 1.0)).to(tl.int32, bitcast=True)
    b_size = b_bits & 0x7FFFFFFF
    # 2^14 is the fp32 number whose last bit is the smallest of e4m3.
    b_small = (b_size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    b_normal = (b_size - (120 << 23) + 0x7FFFF + ((b_size >> 20) & 1)) >> 20
    b_rounded = tl.where(b_size < (121 << 23), b_small, b_normal)
    b_rounded = tl.where(b_size >= (1087 << 20), 0x7F, b_rounded)
    return (b_rounded | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def store_row(store, scale, o_row, m_row, b_first, b_second, D: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Writes keys or values `[R, D]` at offsets `o_row [R]`, given by halves `[R, BLOCK_HALF]` in the layer's dtype."""
    HALF: tl.constexpr = D // 2
    o_d = tl.arange(0, BLOCK_HALF)
    p_x = store + o_row[:, None] + o_d[None, :]
    m_x = m_row[:, None] & (o_d < HALF)[None, :]
    if scale is None:
        tl.store(p_x, b_first, mask=m_x)
        tl.store(p_x + HALF, b_second, mask=m_x)
    else:
        b_first = b_first.to(tl.float32)
        b_second = b_second.to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_first), 1), tl.max(tl.abs(b_second), 1))
        b_scale = tl.div_rn(b_largest, tl.full(b_largest.shape, 448.0, tl.float32))
        tl.store(scale + o_row // D, b_scale, mask=m_row)
        tl.store(p_x, to_fp8(b_first, b_scale[:, None]), mask=m_x)
        tl.store(p_x + HALF, to_fp8(b_second, b_scale[:, None]), mask=m_x)


@triton.jit
def store_partials(
    partial_o, partial_m, partial_l, i_slot, o_r, b_m, b_l, b_o,
    ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Writes one slot; `i_slot` counts over `[B*G, SLOTS]`."""
    o_part = i_slot.to(tl.int64) * ROWS + o_r
    o_d = tl.arange(0, BLOCK_DV)
    m_r = o_r < ROWS
    tl.store(partial_m + o_part, b_m, mask=m_r)
    tl.store(partial_l + o_part, b_l, mask=m_r)
    tl.store(partial_o + o_part[:, None] * DV + o_d[None, :], b_o, mask=m_r[:, None] & (o_d < DV)[None, :])
