"""In the place of a Jetson's jtop.service, for the real client to talk to. Run by a test.

``python jtop_service.py SOCKET VERSION``: speaks as the service of that version (``same``: as the
client's; ``mute``: answers nothing). Orders come as lines on its standard input: ``power`` and the
mapping that it is to publish, in JSON, or ``stop``, after which it publishes nothing new.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

INTERVAL = 0.1  # seconds between values
ORDERS: queue.Queue[dict[str, Any]] = queue.Queue()  # what the client asks and is answered
VALUES: dict[str, Any] = {}
NEWS = threading.Event()


class Manager(SyncManager):
    """Shares what the client looks for, by the names it uses."""


Manager.register("get_queue", callable=lambda: ORDERS)
Manager.register("sync_data", callable=lambda: VALUES)
Manager.register("sync_event", callable=lambda: NEWS)


def answer(version: str) -> None:
    """The client's first question; its answer goes through the very queue it came by."""
    while True:
        asked = ORDERS.get()
        if "interval" in asked:
            board = {"hardware": {"Model": "none"}}
            own = {"version": version, "board": board, "interval": INTERVAL}
            ORDERS.put({"init": own | {"memory": "", "fan": {}, "jc": False}})
        elif "init" in asked:  # its own answer, which the client has not taken yet
            ORDERS.put(asked)
            time.sleep(0.005)


def publish(state: dict[str, Any]) -> None:
    """Values as the service has them, as long as there is power to speak of."""
    count = 0
    while not state.get("stopped"):
        count += 1
        VALUES.update(power=state["power"], uptime=1000 + count * INTERVAL, gpu={}, mem={}, fan={})
        NEWS.set()
        time.sleep(INTERVAL)


def main(path: str, version: str) -> None:
    import jtop  # in this process only: it sets multiprocessing to fork
    from jtop.core.common import get_key

    state: dict[str, Any] = {"power": json.loads(sys.stdin.readline().removeprefix("power"))}
    server = Manager(address=path, authkey=get_key().encode()).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if version != "mute":
        spoken = jtop.__version__ if version == "same" else version
        threading.Thread(target=answer, args=(spoken,), daemon=True).start()
        threading.Thread(target=publish, args=(state,), daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.startswith("power"):
            state["power"] = json.loads(line.removeprefix("power"))
        else:
            state["stopped"] = True


if __name__ == "__main__":
    main(*sys.argv[1:])
