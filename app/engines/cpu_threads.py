"""Keeps an engine's threads on its own cores on a machine without GPUs.

Two facts of NIXL 1.5.1 and vLLM 0.32.0 matter there. NIXL's UCX backend has a progress thread that polls without pause
once memory is registered: it takes a whole core from whoever computes. And `NixlConnector` pins the thread that
computes to the last core of the NUMA node (`nixl/base_worker.py`), whatever `VLLM_CPU_OMP_THREADS_BIND` said: two
engines would share that core.
"""

import logging
import os
import time

import psutil

logger = logging.getLogger("ray.serve")

WATCH_S = 1.0
BUSY = 0.3
"""Share of a core that makes a thread of an idle engine a poller."""


def settle(cores: str) -> None:
    """Bind this process's started, idle engine to `cores` (a list as in "0-3,8") and let pollers yield to everybody.

    Blocks for `WATCH_S` seconds. Pollers get the scheduling policy SCHED_IDLE: they run when nothing else wants to.
    """
    engine = psutil.Process().children(recursive=True)
    before = _cpu_times(engine)
    time.sleep(WATCH_S)
    pollers = [
        thread
        for thread, seconds in _cpu_times(engine).items()
        if thread[0] != thread[1] and seconds - before.get(thread, seconds) > BUSY * WATCH_S
    ]
    for process in engine:
        os.sched_setaffinity(process.pid, core_set(cores))
    for _, thread_id in pollers:
        os.sched_setaffinity(thread_id, range(os.cpu_count() or 1))
        os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))
    logger.info("engine_threads cores=%s pollers=%d", cores, len(pollers))


def core_set(cores: str) -> set[int]:
    """The cores of a list: "0-2,5" is {0, 1, 2, 5}."""
    chosen: set[int] = set()
    for part in cores.split(","):
        first, _, last = part.partition("-")
        chosen |= set(range(int(first), int(last or first) + 1))
    return chosen


def _cpu_times(processes: list[psutil.Process]) -> dict[tuple[int, int], float]:
    """CPU seconds by (process id, thread id)."""
    return {
        (process.pid, thread.id): thread.user_time + thread.system_time
        for process in processes
        for thread in process.threads()
    }
