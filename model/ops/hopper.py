"""What the specialised kernels for Hopper share: names that differ between Triton versions, and barriers."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

# Later Triton has the first name, 3.6 the second.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def signal(slot):
    """All threads of the warpgroup are done with a slot: tell those that wait for its barrier."""
    barrier()
    mbarrier.arrive(slot)


@gluon.jit
def slot_barriers(SLOTS: gl.constexpr, READY: gl.constexpr, FREE: gl.constexpr):
    """Barriers [SLOTS, 1] for slots that are filled and for such that are read, after so many arrivals."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), READY)
        mbarrier.init(free.index(slot), FREE)
    return ready, free
