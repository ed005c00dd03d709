"""Load the server from many threads, and report throughput and latency of every model.

cd examples && python -m serving.load_test [REQUESTS] [CLIENTS] [FILE.csv]

Makes the files, starts the server on this machine, and sends REQUESTS requests to each path from
CLIENTS threads with a connection each. The paths take turns in rounds, so that a busy machine
disturbs all alike. Clients and server share the machine's cores. FILE.csv is where the numbers go,
besides the screen: ../docs/results/measurements/serving.csv for those of docs/scale.md.
"""

from __future__ import annotations

import csv
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from serving import files

PATHS = ("/network", "/predictor", "/onnx")
COLUMNS = ("path", "requests_per_s", "p50_ms", "p99_ms")
ROUNDS = 3
PATIENCE = 600.0  # seconds for the server to start


def request(connection: http.client.HTTPConnection, path: str, body: str) -> dict[str, object]:
    """Send one request and return the answer."""
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(f"{path} answers {response.status}: {content[:200]!r}")
    answer: dict[str, object] = json.loads(content)
    return answer


def load(port: int, path: str, bodies: list[str], clients: int) -> tuple[list[float], float]:
    """Send all requests from many threads; return their latencies and the time of all."""
    waiting, latencies, errors = list(bodies), list[float](), list[Exception]()

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            while True:
                try:
                    body = waiting.pop()
                except IndexError:
                    return
                start = time.perf_counter()
                request(connection, path, body)
                latencies.append(time.perf_counter() - start)
        except Exception as error:  # shown by the main thread
            errors.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return latencies, time.perf_counter() - start


def wait_until_healthy(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait for the server to load its models."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


def main() -> None:
    """Run the load test, print the results, and write them if a file is named."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    clients = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    target = Path(sys.argv[3]).absolute() if len(sys.argv) > 3 else None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        files.write(Path(name))
        x, _ = files.images(200, seed=9)
        bodies = [json.dumps({"x": row}) for row in x.tolist()]
        bodies = [bodies[i % len(bodies)] for i in range(max(1, count // ROUNDS))]
        command = [sys.executable, "-m", "serving.server", name, str(port)]
        # A session of its own, so that its workers end with it.
        folder = Path(__file__).parents[1]
        server = subprocess.Popen(command, cwd=folder, start_new_session=True)
        try:
            wait_until_healthy(port, server)
            found: dict[str, tuple[list[float], float]] = {path: ([], 0.0) for path in PATHS}
            for path in PATHS:
                load(port, path, bodies[:clients], clients)  # a warm-up
            for _ in range(ROUNDS):
                for path in PATHS:
                    latencies, seconds = load(port, path, bodies, clients)
                    found[path] = found[path][0] + latencies, found[path][1] + seconds
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)
    print(f"{len(bodies) * ROUNDS} requests to each path, {clients} clients")
    rows = [COLUMNS]
    for path, (latencies, seconds) in found.items():
        p50, p99 = np.percentile(np.array(latencies) * 1000, [50, 99])
        rows.append((path, f"{len(latencies) / seconds:.1f}", f"{p50:.2f}", f"{p99:.2f}"))
    for row in rows:
        print("{:12} {:>14} {:>8} {:>8}".format(*row))
    if target is not None:
        with target.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
