"""Two processes of torch.distributed that wait for work: starting them takes longer than any test."""

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


class Ranks:
    """Runs functions on all ranks at once."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.results = context.Queue()
        self.queues = [context.Queue() for _ in range(RANKS)]
        directory = tempfile.mkdtemp()
        self.processes = [
            context.Process(target=_serve, args=(rank, directory, queue, self.results), daemon=True)
            for rank, queue in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``[function(rank, *args) of each rank]``. An error of a rank fails the test, with its traceback."""
        for queue in self.queues:
            queue.put((function, args))
        answers = dict(self.results.get(timeout=100) for _ in range(RANKS))
        for rank in range(RANKS):
            error = answers[rank][1]
            assert error is None, f"rank {rank}: {error}"
        return [answers[rank][0] for rank in range(RANKS)]

    def close(self) -> None:
        for queue in self.queues:
            queue.put(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, directory: str, queue: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    while (work := queue.get()) is not None:
        function, args = work
        try:
            answer = function(rank, *args), None
        except Exception:
            answer = None, traceback.format_exc()
        results.put((rank, answer))
    dist.destroy_process_group()
