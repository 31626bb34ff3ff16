"""Random units through generated kernels under the interpreter.

One seed is one unit, drawn from a plain generator: hypothesis' own choices are too small and too alike to reach what matters.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostir.dispatch import KernelExecutor
from hostir.kernels.tiling import Target
from tests.kernels.random_units import check_results, unit
from tests.kernels.support import reference

# The interpreter's own large tiles, and those of a device with few processors, made to measure and in classes.
TARGETS = (Target(True), Target(True), Target(False, True, 2), Target(False, False, 2))


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_random_units_match_the_reference(seed: int) -> None:
    f, args = unit(seed)
    if not f.ops:
        return
    answer = KernelExecutor.supports(f)
    if not answer:
        assert {o.name for o in f.ops} & {"silu", "gelu"}, answer.why  # type: ignore[union-attr]
        return
    want = [w.clone() for w in reference(f, args)]
    ex = KernelExecutor(target=TARGETS[seed % len(TARGETS)]).compile(f, args)
    check_results(f, ex._run(args, None), want)
