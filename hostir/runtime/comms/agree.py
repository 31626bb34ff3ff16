"""Do the members of a team mean the same communication? Backends do not ask, and then move garbage or crash.

Every call has a ``signature``: what all members must have in common. Facts that differ by rank (peers of a permute, row counts)
travel beside it as numbers. ``disagreement`` looks at all members' facts at once, so that every member raises the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hostir.errors import RankMismatchError
from hostir.runtime.comms.protocol import REDUCTIONS, CommCall, show_type


def signature(call: CommCall, rank: int) -> str:
    """What must be the same on all members, as text: kind, dtype, sizes, reduction, root, dims."""
    here = call.team.index(rank)
    parts = [call.kind]
    match call.kind:
        case "allgather" | "allreduce" | "reduce_scatter" | "reduce" | "gather" | "alltoall":
            parts.append(show_type(call.ins[0]))
        case "broadcast":
            parts.append(show_type(call.ins[0] if here == call.source else call.outs[0]))
        case "scatter":
            parts.append(show_type(call.outs[0]))
        case "alltoallv":
            parts.append(str(call.ins[0].dtype) + str(list(call.ins[0].shape[1:])))
        case "send":
            parts = ["message", show_type(call.ins[0])]
        case "recv":
            parts = ["message", show_type(call.outs[0])]
    if call.kind in REDUCTIONS:
        parts.append(call.op)
    if call.kind in ("reduce", "gather"):
        parts.append(f"to {call.to}")
    if call.kind in ("broadcast", "scatter"):
        parts.append(f"from {call.source}")
    if call.kind in ("allgather", "reduce_scatter", "gather", "scatter"):
        parts.append(f"dim {call.dim % max((call.ins or call.outs)[0].dim(), 1)}")
    if call.kind == "alltoall":
        parts.append(f"split {call.split % call.ins[0].dim()} cat {call.cat % call.ins[0].dim()}")
    return " ".join(parts)


def num_facts(num_members: int) -> int:
    """How many numbers ``facts`` gives, for a team of ``num_members`` (a message has two)."""
    return 6 + 2 * num_members


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def facts(call: CommCall, rank: int) -> list[int]:
    """The call as a fixed number of integers (less than 2^63), for comparing without moving text."""
    out = [
        _hash(signature(call, rank)),
        -1 if call.to is None else call.to,
        -1 if call.source is None else call.source,
        _hash(show_type(call.ins[0])) if call.ins and call.kind == "permute" else 0,
        _hash(show_type(call.outs[0])) if call.outs and call.kind == "permute" else 0,
        1 if call.kind == "alltoallv" else 2 if call.kind == "permute" else 0,
    ]
    num = 2 if call.kind in ("send", "recv") else len(call.team)
    return out + list(call.send_counts or [0] * num) + list(call.recv_counts or [0] * num)


def complaint(rows: Sequence[Sequence[int]]) -> str | None:
    """What is wrong between the members' ``facts`` (in team order), or None. Positions in the team, not world ranks."""
    num = len(rows)
    if len({row[0] for row in rows}) > 1:
        return "the ranks disagree on what is communicated"
    if rows[0][5] == 2:
        for i, row in enumerate(rows):
            to, source = row[1], row[2]
            if to >= 0 and rows[to][2] != i:
                return f"position {i} sends to {to}, but position {to} {_listens(rows[to][2])}"
            if source >= 0 and rows[source][1] != i:
                return f"position {i} listens to {source}, but position {source} {_speaks(rows[source][1])}"
            if to >= 0 and row[3] != rows[to][4]:
                return f"position {to} does not expect the tensor that position {i} sends"
    if rows[0][5] == 1:
        for i, row in enumerate(rows):
            for j in range(num):
                sent, awaited = row[6 + j], rows[j][6 + num + i]
                if sent != awaited:
                    return f"position {i} sends {sent} rows to {j}, but position {j} expects {awaited} from it"
    return None


def _listens(source: int) -> str:
    return "listens to nobody" if source < 0 else f"listens to {source}"


def _speaks(to: int) -> str:
    return "sends to nobody" if to < 0 else f"sends to {to}"


def mismatch(
    why: str, number: int | None, team: Sequence[int], texts: Sequence[str], rank: int, *, statement: str | None = None
) -> RankMismatchError:
    """The error that every member raises; ``texts`` are the calls in team order, ``number`` counts the team's
    collectives from 0 (None: a message)."""
    lines = [f"    rank {r}: {t}" for r, t in zip(team, texts, strict=True)]
    mine = texts[list(team).index(rank)]
    others = [f"rank {r}: {t}" for r, t in zip(team, texts, strict=True) if r != rank and t != mine]
    return RankMismatchError(
        "\n".join([why if number is None else f"{why} (communication {number} of team {list(team)})", *lines]),
        rank=rank,
        statement=statement,
        expected=others[0] if others else None,
        got=f"rank {rank}: {mine}",
        cure="every member must run the same communications in the same order, with the same sizes",
    )
