"""Worker processes: each does the same task with other chunks, and the results keep their order.

concurrent.futures would be shorter, but its thread that fills the workers' queue waits for ever if
the workers are killed while they are being shut down (Python 3.11), and its workers stay when the
main process is killed. Here, only a worker that exists is waited for.
"""

import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from queue import SimpleQueue
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


def start(process: BaseProcess) -> None:
    """Start a worker, in which SIGINT is blocked from its first moment.

    Ctrl-C is handled by the main process, which then ends the worker. A Ctrl-C during the start
    waits for its end: else the worker would read from a pipe that is closed.
    """
    ensure_running()  # start() would do so, and let SIGINT through again
    pressed: list[int] = []
    # The worker inherits the mask. It holds for this thread alone, and a signal that another thread
    # receives is handled in this one, too.
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    added = {name: value for name, value in LEAN.items() if name not in os.environ}
    os.environ |= added
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
        for name in added:
            del os.environ[name]
    if pressed:
        signal.raise_signal(signal.SIGINT)


class Worker:
    """A process that does the task with every chunk that it is sent, in their order."""

    def __init__(self, task: Task):
        self.todo: deque[Future] = deque()  # for the results that have not come yet
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(task, other), daemon=True)
        start(self.process)
        other.close()  # now only the worker holds it, and self.pipe fails when the worker has ended

    def send(self, chunk: Chunk) -> Future:
        """Send a chunk, and return the place where take_result() will put its result."""
        with self.killed_is_an_error():
            self.pipe.send(chunk)
        self.todo.append(Future())
        return self.todo[-1]

    def take_result(self) -> None:
        """Wait for the result of the oldest chunk that has none yet."""
        with self.killed_is_an_error():
            result = self.pipe.recv()
        if isinstance(result, Exception):
            self.todo.popleft().set_exception(result)
        else:
            self.todo.popleft().set_result(result)

    @contextmanager
    def killed_is_an_error(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode > 0:
                raise RuntimeError("a worker process has ended: see its error above") from None
            killed = "a worker process was killed, as the system does when memory runs out"
            raise UserError(f"{killed}: lower --workers") from None

    def end(self) -> None:
        self.process.kill()  # it writes no files
        self.process.join()
        self.pipe.close()


def serve(task: Task, pipe: Connection) -> None:
    """Do the work of a worker process."""
    chunks: SimpleQueue = SimpleQueue()
    # These threads empty and fill the pipe, so that neither process waits for the other one to do
    # so while there is work. If the main process has ended, the first of them notices.
    threading.Thread(target=receive, args=(pipe, chunks), daemon=True).start()
    sender = ThreadPoolExecutor(1)
    while True:
        chunk = chunks.get()
        try:
            result = task(chunk)
        except Exception as e:
            if not isinstance(e, (UserError, MemoryError)):
                traceback.print_exc()  # the place is lost when the error is sent
            result = e
        sender.submit(pipe.send_bytes, pickle.dumps(result))


def receive(pipe: Connection, chunks: SimpleQueue) -> None:
    try:
        while True:
            chunks.put(pipe.recv())
    except (EOFError, OSError):
        pass  # the main process has ended, however that came about
    except Exception:
        traceback.print_exc()
    os._exit(1)


def in_order(task: Task, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Any]]:
    """Yield (chunk, result of the task) for every chunk, in their order, with few in memory.

    With one worker this process does the work itself. With several, of which no more are started
    than there are chunks, each has one chunk to work at and one to go on with, and the chunks that
    are yielded have lost their records. Raises UserError if a worker was killed.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk, task(chunk)
        return
    pool: list[Worker] = []
    waiting: deque[tuple[Chunk, Future]] = deque()
    try:
        for chunk in chunks:
            if len(pool) < workers:
                pool.append(Worker(task))
            while len((worker := has_fewest(pool)).todo) > 1:
                take_results(pool)
            waiting.append((replace(chunk, records=[]), worker.send(chunk)))
            del chunk
            while waiting and (waiting[0][1].done() or len(waiting) > 3 * len(pool)):
                yield first_of(waiting, pool)
        while waiting:
            yield first_of(waiting, pool)
    finally:
        for worker in pool:
            worker.end()


def first_of(waiting: deque[tuple[Chunk, Future]], pool: list[Worker]) -> tuple[Chunk, Any]:
    """Take out the first chunk, and wait for its result."""
    position, future = waiting.popleft()
    while not future.done():
        take_results(pool)
    return position, future.result()


def has_fewest(pool: list[Worker]) -> Worker:
    return min(pool, key=lambda worker: len(worker.todo))


def take_results(pool: list[Worker]) -> None:
    """Take the results that have come. If there is none, wait for one."""
    workers = {worker.pipe: worker for worker in pool if worker.todo}
    for pipe in wait(workers):
        workers[pipe].take_result()
