"""Worker processes: each does the same task with other chunks, and the results keep their order.

concurrent.futures' own processes would be shorter, but its thread that fills their queue waits for
ever if they are killed while they are being shut down (Python 3.11), and they stay when the main
process is killed. Here, each thread of a ThreadPoolExecutor has one worker, and waits for it alone.
"""

import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
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


def start_worker(task: Task, processes: list[BaseProcess]) -> Connection:
    """Start a worker for the thread that calls this, and return the pipe to it."""
    # The process inherits the mask: Ctrl-C is handled by the main process, which then kills it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    context = get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=serve, args=(task, other_end), daemon=True)
    processes.append(process)
    process.start()
    other_end.close()  # now only the process holds it, and `pipe` fails when that ends
    return pipe


def serve(task: Task, pipe: Connection) -> None:
    """Do the work of a worker process, until the main process has ended."""
    with suppress(EOFError, OSError):
        while True:
            chunk = pipe.recv()
            try:
                result = task(chunk)
            except Exception as e:
                if not isinstance(e, (UserError, MemoryError)):
                    traceback.print_exc()  # the place is lost when the error is sent
                result = e
            pipe.send(result)


def in_order(task: Task, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Any]]:
    """Yield (chunk, result of the task) for every chunk, in their order, with few in memory.

    With one worker this process does the work itself. With several, of which no more are started
    than there are chunks, the chunks that are yielded have lost their records. Raises UserError if
    a worker was killed.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, task(chunk)
        return
    for name, value in LEAN.items():
        os.environ.setdefault(name, value)
    ensure_running()  # else the start of a process would do so, and let SIGINT through again
    processes: list[BaseProcess] = []
    of_thread = threading.local()

    def in_worker(chunk: Chunk) -> Any:
        try:
            if not hasattr(of_thread, "pipe"):
                of_thread.pipe = start_worker(task, processes)
            of_thread.pipe.send(chunk)
            result = of_thread.pipe.recv()
        except (EOFError, OSError):
            reason = "a worker process could not start or was killed, as happens when memory"
            raise UserError(f"{reason} runs out: lower --workers") from None
        if isinstance(result, Exception):
            raise result
        return result

    threads = ThreadPoolExecutor(workers)  # starts a thread when none of those it has is free
    waiting = deque()
    try:
        for chunk in chunks:
            waiting.append((replace(chunk, records=[]), threads.submit(in_worker, chunk)))
            del chunk
            while waiting and (waiting[0][1].done() or len(waiting) > 3 * workers):
                position, future = waiting.popleft()
                yield position, future.result()
        for position, future in waiting:
            yield position, future.result()
    finally:
        # Ctrl-C may come at any moment, even while a worker starts: nothing here waits for one.
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            if process.pid:
                process.kill()  # it writes no files
