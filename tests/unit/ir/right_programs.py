"""Programs that are right on every rank, as text: every check must accept them, and each test of a check breaks one of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from hostir.ir.nodes import Program
from hostir.ir.parse import parse_program

UNITS: Final = """
unit @mm_acc(%a: f32[2, 8], %b: f32[8, 3], %c: f32[2, 3]) {
  %t = mm(%a, %b)
  %o = add(%c, %t)
  return %o
}
unit @double(%a: f32[n]) {
  %t = add(%a, %a)
  return %t
}
"""

RING: Final = """
program @ring_mm(%x: f32[2, 8], %w: f32[4, 8, 3]) mesh(tp = 4) scheduled {
  %y = zeros f32[2, 3]
  %buf = alloc f32[2, 2, 8]
  %v = view %buf[0]
  %v <- copy(%x)
  for %i in 0 .. 4 {
    %cur = view %buf[%i % 2]
    %nxt = view %buf[(%i + 1) % 2]
    sync comm -> main
    sync main -> comm
    %nxt <- permute(%cur to (rank(tp) + 1) % 4 from (rank(tp) + 3) % 4) over tp on comm
    %wi = view %w[(rank(tp) - %i) % 4]
    %y <- @mm_acc(%cur, %wi, %y)
  }
  return %y
}
"""

# The same without streams, and with the syncs where they are right and hide nothing.
RING_IN_ORDER: Final = (
    RING.replace("    sync comm -> main\n    sync main -> comm\n", "").replace(" on comm", "").replace("(tp = 4) scheduled", "(tp = 4)")
)
RING_SERIAL: Final = RING.replace("    sync comm -> main\n", "").replace("    %wi", "    sync comm -> main\n    %wi")

ROTATED: Final = """
program @rotated(%x: f32[4]) mesh(tp) scheduled {
  %all = alloc f32[size(tp), 4]
  %own = view %all[rank(tp)]
  %own <- copy(%x)
  for %j in 1 .. size(tp) {
    %from = view %all[(rank(tp) - %j + 1) % size(tp)]
    %into = view %all[(rank(tp) - %j) % size(tp)]
    sync main -> comm
    !e = %into <- permute(%from to (rank(tp) + 1) % size(tp) from (rank(tp) - 1) % size(tp)) on comm
    %back = view %all[(rank(tp) - %j + 1) % size(tp)]
    %done = alloc f32[4]
    %done <- @double(%back)
    sync !e -> main
  }
  return %all
}
"""

TWO_STREAMS: Final = """
program @two_streams(%x: f32[8, 4]) scheduled {
  %y = alloc f32[8, 4]
  for %i in 0 .. 8 {
    %a = view %x[%i]
    %b = view %y[%i]
    %b <- @double(%a) on s[%i % 2]
  }
  return %y
}
"""

MESSAGES: Final = """
program @messages(%x: f32[4]) mesh(pp) {
  %y = zeros f32[4]
  if rank(pp) > 0 {
    %y <- recv(from rank(pp) - 1)
  }
  %z = alloc f32[4]
  %z <- @double(%y)
  if rank(pp) < size(pp) - 1 {
    send(%z to rank(pp) + 1)
  }
  return %z
}
"""

EXCHANGE: Final = """
program @exchange(%x: f32[4]) mesh(tp) {
  %y = alloc f32[4]
  for %i in 0 .. 3 {
    group on comm {
      send(%x to (rank(tp) + 1) % size(tp))
      %y <- recv(from (rank(tp) - 1) % size(tp))
    }
  }
  return %y
}
"""

ROOTED: Final = """
program @rooted(%x: f32[4]) mesh(tp) {
  %all = zeros f32[size(tp), 4]
  %sum = zeros f32[4]
  for %r in 0 .. size(tp) {
    %part = alloc f32[4]
    %part <- broadcast(%x from %r)
    %to = view %all[%r]
    %to <- copy(%part)
    %sum <- reduce(%part sum to %r)
  }
  return %all, %sum
}
"""

GRID: Final = """
program @grid(inout %x: f32[4], inout %y: f32[4]) mesh(dp = 2, tp = 2) {
  %x <- allreduce(%x) over dp on a
  %y <- allreduce(%y max) over tp on b
  %g = alloc f32[8]
  %g <- allgather(%x) over tp
  %x <- reduce_scatter(%g) over tp
  %t = alloc f32[4]
  %t <- alltoall(%x) over (dp, tp)
  barrier()
  return %t
}
"""

UNEVEN: Final = """
program @uneven(%x: f32[m]) mesh(tp) {
  %y = alloc f32[m]
  for %c in 0 .. 3 {
    %a = view %x[min(%c * ((m + 2) // 3), m) : min((%c + 1) * ((m + 2) // 3), m)]
    %b = view %y[min(%c * ((m + 2) // 3), m) : min((%c + 1) * ((m + 2) // 3), m)]
    %b <- @double(%a)
  }
  return %y
}
"""

SHARES: Final = """
program @shares(%x: f32[6]) mesh(tp = 2) {
  %y = alloc f32[6]
  if rank(tp) == 0 {
    %y <- alltoallv(%x send [2, 4] recv [2, 4])
  } else {
    %y <- alltoallv(%x send [4, 2] recv [4, 2])
  }
  return %y
}
"""

PUSH: Final = """
program @push(%x: f32[4]) mesh(tp) scheduled {
  %b = alloc f32[4] symmetric
  %f = zeros i32[] symmetric
  %o = alloc f32[4]
  barrier()
  sync main -> c
  %p = view %b.peer((rank(tp) + 1) % size(tp))
  %p <- copy(%x) on c
  signal(%f to (rank(tp) + 1) % size(tp) value 1) on c
  wait(%f value 1)
  %o <- copy(%b)
  return %o
}
"""

PULL: Final = """
program @pull(%x: f32[4]) mesh(tp) {
  %b = alloc f32[4] symmetric
  %o = alloc f32[4]
  %b <- copy(%x)
  barrier()
  %p = view %b.peer((rank(tp) + 1) % size(tp))
  %o <- copy(%p)
  barrier()
  %b <- copy(%o)
  return %o
}
"""

GATED: Final = """
program @gated(%x: f32[2, 4]) mesh(tp) scheduled {
  %b = alloc f32[2, 4] symmetric
  %f = zeros i32[2] symmetric
  %o = alloc f32[8]
  barrier()
  sync main -> copies
  for %i in 0 .. 2 {
    %from = view %x[%i]
    %into = view %b[%i]
    %into <- copy(%from) on copies
    %flag = view %f[%i]
    signal(%flag to rank(tp) value 1) on copies
  }
  %flat = view %b.reshape(8)
  %o <- @double(%flat) awaits %f
  return %o
}
"""


class Right(NamedTuple):
    text: str
    mesh: int | None = None
    dims: dict[str, int] | None = None


RIGHT: Final = {
    "ring": Right(RING),
    "ring in order": Right(RING_IN_ORDER),
    "ring serial": Right(RING_SERIAL),
    "rotated on 1": Right(ROTATED, 1),
    "rotated on 4": Right(ROTATED, 4),
    "two streams": Right(TWO_STREAMS),
    "messages on 1": Right(MESSAGES, 1),
    "messages on 4": Right(MESSAGES, 4),
    "exchange on 1": Right(EXCHANGE, 1),
    "exchange on 3": Right(EXCHANGE, 3),
    "rooted on 3": Right(ROOTED, 3),
    "grid": Right(GRID),
    "uneven": Right(UNEVEN, 2, {"m": 7}),
    "uneven, empty parts": Right(UNEVEN, 2, {"m": 1}),
    "shares": Right(SHARES),
    "push on 3": Right(PUSH, 3),
    "pull on 3": Right(PULL, 3),
    "gated on 2": Right(GATED, 2),
}


def program(text: str) -> Program:
    """The text with the units above in front."""
    return parse_program(UNITS + text)


def without(text: str, *lines: str) -> str:
    """The text less one occurrence of each line, which must be there."""
    for line in lines:
        assert line in text
        text = text.replace(line, "", 1)
    return text


def changed(text: str, old: str, new: str) -> str:
    """The text with one part replaced, which must be there."""
    assert old in text
    return text.replace(old, new, 1)
