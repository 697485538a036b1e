"""Worker processes: they apply one task to many chunks, and the results keep the chunks' order."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from configurator import UserError, note
from hardware.terminal import ProgressBar
from text.formats import Chunk, Source, read_chunks
from text.records import Tally, check_bad, check_unread
from text.settings import PrepareConfig

# The function that a worker applies to chunks. It is sent to each worker once, at its start.
Task = Callable[[Chunk], tuple[Any, Tally]]
worker_tasks: list[Task] = []  # in a worker: one


def map_chunks(
    title: str,
    task: Task,
    cfg: PrepareConfig,
    sources: list[Source],
    workers: int,
    tally: Tally,
) -> Iterator[Any]:
    """Read all files, and yield the result of the task for each chunk, with a progress bar.

    Without a terminal, a line tells the progress once a minute. The records are counted in `tally`.
    Raises UserError if too many of them are bad, or if no document is left.
    """
    total = sum(source.bytes for source in sources)
    started = shown = time.monotonic()
    with ProgressBar(title, total=total, unit_scale=True) as bar:
        for bytes_read, (result, counts) in map_in_order(task, read_chunks(sources, cfg), workers):
            tally.add(counts)
            # With an estimate of all records, a run with too many bad ones stops early.
            check_bad(tally, cfg, max(10_000, tally.records * total // max(1, bytes_read)))
            yield result
            bar.update(bytes_read - bar.n)
            if bar.disable and (now := time.monotonic()) > shown + 60:
                shown = now
                left = bar.format_interval((now - started) * (total / max(1, bytes_read) - 1))
                note(f"{title}: {bytes_read / max(1, total):.0%}, {left} left")
    check_bad(tally, cfg, tally.records)
    check_unread(tally, cfg)
    if tally.shapes.total() == tally.dropped.total():
        dropped = ", ".join(f"{n:,} x {reason}" for reason, n in tally.dropped.items())
        raise UserError(f"no documents: {dropped or 'the input is empty'}")


def begin_worker(task: Task) -> None:
    """Store the task for do_task(), and end this worker when the main process ends."""
    worker_tasks.append(task)
    threading.Thread(target=exit_with_parent, daemon=True).start()


def exit_with_parent() -> None:
    multiprocessing.parent_process().join()  # pyrefly: ignore[missing-attribute]
    os._exit(1)


def do_task(chunk: Chunk) -> Any:
    return worker_tasks[0](chunk)


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt for a Ctrl-C in the block only after the block.

    Workers that start in the block inherit the mask: the main process alone handles Ctrl-C. The
    mask is not enough for the main process, whose other threads get signals.
    """
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if pressed and callable(handler):  # it may be SIG_IGN
        handler(pressed[0], None)


def map_in_order(task: Task, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[int, Any]]:
    """Yield (bytes read, result of the task) for every chunk, in the order of the chunks.

    With one worker this process does the work itself. Raises UserError if a worker was killed.
    """
    if workers == 1:
        for chunk in chunks:
            yield chunk.bytes_read, task(chunk)
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of workers: idle threads wait busily
    # Not fork: the main process has threads by now, and a copy of their locks may stay locked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, begin_worker, (task,))
    waiting = deque()
    try:
        for chunk in chunks:
            with deferred_interrupt():  # submit() may start a worker
                waiting.append((chunk.bytes_read, pool.submit(do_task, chunk)))
            del chunk  # only a few are in memory
            while waiting and (waiting[0][1].done() or len(waiting) > 3 * workers):
                bytes_read, future = waiting.popleft()
                yield bytes_read, future.result()
        for bytes_read, future in waiting:
            yield bytes_read, future.result()
    except BrokenProcessPool:
        # A worker that was started just then would wait for chunks, and this process for its end.
        for worker in multiprocessing.active_children():
            worker.kill()
        reason = "a worker process could not start or was killed, as happens when memory runs out"
        raise UserError(f"{reason}: lower --workers or --max_record_mb") from None
    finally:
        # Workers end after their current chunks. A worker killed in the middle of a result would
        # leave a part of it in the pipe, and this process would wait for the rest at its exit.
        pool.shutdown(wait=False, cancel_futures=True)
