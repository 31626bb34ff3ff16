"""A sum along a host dimension: c = Σ_h a[h] · b[h], the addition fused into the unit that makes the term, in place."""

import torch

import hostir as hir


@hir.unit
def fma(a, b, c):
    return c + a.float() * b.float()


def host_sum(num_terms, n, dtype=torch.bfloat16):
    with hir.Program("host_sum") as p:
        a = p.input("a", (num_terms, n), dtype)
        b = p.input("b", (num_terms, n), dtype)
        c = p.zeros((n,), torch.float32, name="c")
        with p.loop(num_terms, name="h") as h:
            p.call(fma, a[h], b[h], c, out=c)  # c on both sides of the arrow: updated in place
        p.output(c)
    return p


def main(num_terms: int = 8, n: int = 1 << 16) -> None:
    program = host_sum(num_terms, n)
    print(program)
    run = hir.compile(program)
    a, b = torch.randint(-8, 9, (2, num_terms, n), generator=torch.Generator().manual_seed(0)).bfloat16()
    c = run(a, b)
    expected = (a.float() * b.float()).sum(0)
    assert torch.equal(c, expected)  # integer-valued data: exact
    print(f"c = sum over {num_terms} terms of {n} elements: equal to torch, checksum {c.double().sum().item():.0f}")


if __name__ == "__main__":
    main()
