"""Start several processes on one machine, connected by gloo, for the tests of ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

SECONDS = 240  # within which every rank must have ended


def together(ranks: int, work: Callable[..., Any], *arguments: Any, answer: float = 200.0) -> list[Any]:
    """The results of ``work(reducer, *arguments)`` on each rank; exceptions are returned, not raised.

    answer: seconds that a rank waits for another.

    A rank that was killed returns None; one that hangs fails the test.
    """
    context = multiprocessing.get_context("forkserver")
    # What every rank would import by itself, torch._dynamo when it makes its optimizer.
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "soseleto.training.fit", "soseleto.methods"]
    )
    pipes, processes = [], []
    port = free_port()
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(rank, ranks, port, answer, theirs, work, arguments))
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    answers = [_answer(pipe) for pipe in pipes]
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            raise AssertionError("a rank hangs")
    return answers


def _answer(pipe: Any) -> Any:
    if not pipe.poll(SECONDS):
        return AssertionError("no answer")
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _run(
    rank: int, ranks: int, port: int, answer: float, pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch

    import soseleto

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        with soseleto.ranks("cpu", answer=timedelta(seconds=answer)) as reducer:
            pipe.send_bytes(pickle.dumps(work(reducer, *arguments)))
    except soseleto.SoseletoError as error:
        pipe.send_bytes(pickle.dumps((type(error).__name__, str(error))))
    except Exception:
        pipe.send_bytes(pickle.dumps(("unexpected", traceback.format_exc())))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])
