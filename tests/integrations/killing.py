"""Score a job in processes that are killed at random moments, until it is done.

python killing.py JOB SEED KILLS

This process imports everything once and forks for every attempt. It reads how far the child is from
a pipe, waits for a random number of parts and then a random time, and sends SIGKILL. It prints the
number of kills and the number of drafts that they left behind.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from acnml.scoring import Job, score
from acnml.scoring.run import locally
from acnml.scoring.sources import Unit

MOST_PARTS, LONGEST_WAIT = 4, 0.02


def attempt(job: Job, rng: random.Random) -> bool:
    """Run the job in a child and kill it; return whether it was killed before its end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:

            def told(job: Job, units: Sequence[Unit]) -> Iterator[int]:
                os.write(writer, b".")
                for rows in locally(job, units):
                    os.write(writer, b".")
                    yield rows

            score(job, told)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    for _ in range(rng.randrange(MOST_PARTS)):
        if not os.read(reader, 1):
            break
    time.sleep(rng.uniform(0, LONGEST_WAIT))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(reader)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        sys.exit("the child failed by itself")
    return os.WIFSIGNALED(status)


def main() -> None:
    job, seed, wanted = Job(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng, kills, drafts = random.Random(seed), 0, 0
    while kills < wanted:
        if attempt(job, rng):
            kills += 1
            drafts += len(list(Path(job.output).rglob(".*.tmp")))
        else:  # done too early: kill the rest of the times in a new run
            shutil.rmtree(job.output)
    score(job)
    print(json.dumps({"kills": kills, "drafts": drafts}))


if __name__ == "__main__":
    main()
