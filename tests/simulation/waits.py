"""The program of ``test_seams.py``, with ``seams.c`` preloaded: two ranks that sleep, and wait for each other."""

import _thread
import ctypes
import json
import os
import queue
import sys
import threading
import time

seams = ctypes.CDLL(None)
seams.fp_sim_digest.restype = ctypes.c_uint64
seams.fp_sim_state.restype = ctypes.c_char_p


def run(seed, functions):
    seams.fp_sim_reset(ctypes.c_uint64(seed), ctypes.c_int64(60_000_000_000), 128)
    for rank, function in enumerate(functions):
        seams.fp_sim_spawn(rank)
        _thread.start_new_thread(function, ())
    return seams.fp_sim_run()


def sleep_and_wait(seed):
    items, found = queue.Queue(), {"got": [], "processes": [0, 0]}

    def give():
        begin = time.monotonic()
        for i in range(5):
            time.sleep(1)
            items.put(i)
        found["slept"] = round(time.monotonic() - begin, 3)
        found["processes"][0] = os.getpid()

    def take():
        thread = threading.Thread(target=time.sleep, args=(2.5,))
        thread.start()
        for _ in range(5):
            found["got"].append(items.get())
        thread.join()
        begin = time.monotonic()
        try:
            items.get(timeout=3)
        except queue.Empty:
            found["waited"] = round(time.monotonic() - begin, 3)
        found["processes"][1] = os.getpid()

    begin = time.monotonic()
    found["reason"] = run(seed, [give, take])
    return {**found, "real": time.monotonic() - begin, "digest": seams.fp_sim_digest()}


def wait_for_ever():
    def wait():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    reason = run(0, [wait, wait])
    return {"reason": reason, "states": [seams.fp_sim_state(i).decode() for i in range(2)]}


for argument in sys.argv[1:]:
    print(json.dumps(wait_for_ever() if argument == "stuck" else sleep_and_wait(int(argument))), flush=True)
os._exit(0)  # threads may wait for ever
