"""Worker processes: each does the same task with other chunks, and the results keep their order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from configurator import UserError
from text.formats import Chunk

Task = Callable[[Chunk], Any]  # the work of a worker; it is sent to each worker once, at its start

# For the environment of workers, where the user has not set these. A worker has no work for the
# threads that numpy would start, and they would wait for it busily. It keeps some freed memory for
# the next chunk, in large pages. (Blocks of 32 MiB and more are given back; glibc allows no more.
# Large pages need glibc 2.35; other systems ignore all of it.)
LEAN = {
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432"
    ":glibc.malloc.trim_threshold=134217728",
}


def begin_worker(task: Task) -> None:
    """Keep the task for do_task(), and end this worker when the main process ends."""
    global worker_task
    worker_task = task
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])  # a pipe that the end of the parent closes
    os._exit(1)


def do_task(chunk: Chunk) -> Any:
    return worker_task(chunk)


def in_order(task: Task, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Any]]:
    """Yield (chunk, result of the task) for every chunk, in their order, with few in memory.

    With one worker this process does the work itself. With several, the chunks that are yielded
    have lost their records. Raises UserError if a worker was killed.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, task(chunk)
        return
    for name, value in LEAN.items():
        os.environ.setdefault(name, value)
    # Not fork: the main process has threads by now, and a copy of their locks may stay locked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, begin_worker, (task,))
    waiting = deque()
    try:
        for chunk in chunks:
            # Workers inherit the mask: the main process handles Ctrl-C, and then kills them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            waiting.append((replace(chunk, records=[]), pool.submit(do_task, chunk)))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            del chunk
            while waiting and (waiting[0][1].done() or len(waiting) > 3 * workers):
                position, future = waiting.popleft()
                yield position, future.result()
        for position, future in waiting:
            yield position, future.result()
    except BrokenProcessPool:
        reason = "a worker process could not start or was killed, as happens when memory runs out"
        raise UserError(f"{reason}: lower --workers or --max_record_mb") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()  # it writes no files
