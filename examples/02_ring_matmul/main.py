"""Allgather + GEMM on a ring: every rank multiplies the rows that it holds while the next rank's rows are on their way."""

import torch

import hostir as hir


def ring_ag_gemm(mesh, m, k, n, dtype=torch.float32):
    d = mesh.size  # an int on a sized mesh; on hir.Mesh(("tp",)) the expression size(tp): one text for every world
    with hir.Program("ring_ag_gemm", mesh=mesh) as p:
        x = p.input("x", (m // d, k), dtype)
        w = p.input("w", (k, n), dtype)
        y = p.empty((d, m // d, n), dtype, name="y")
        buf = p.empty((d, m // d, k), dtype, name="buf")
        r = p.rank()
        p.copy(x, out=buf[0])
        with p.loop(d, name="j") as j:
            with p.if_(j < d - 1):
                p.permute(buf[j], out=buf[j + 1], to=(r + 1) % d, source=(r - 1) % d, on="comm")
            p.matmul(buf[j], w, out=y[(r - j) % d])
        p.output(y)
    return p


def main(m: int = 192, k: int = 64, n: int = 48) -> float:
    with hir.launch.init() as world:
        mesh = world.mesh(("tp",))
        run = hir.compile(ring_ag_gemm(mesh, m, k, n))
        rows = torch.randint(-8, 9, (m, k), generator=torch.Generator().manual_seed(1)).float()
        w = torch.randint(-8, 9, (k, n), generator=torch.Generator().manual_seed(2 + world.rank)).float()
        y = run(rows.chunk(world.size)[world.rank].to(world.device), w.to(world.device))
        assert torch.equal(y.reshape(m, n).cpu(), rows @ w)  # integer-valued data: exact on every transport
        if world.rank == 0:
            print(run.program)
            print(f"rank 0 of {world.size}: equal to torch, checksum {y.double().sum().item():.0f}")
        return float(y.double().sum())


if __name__ == "__main__":
    main()
