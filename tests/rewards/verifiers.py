"""Verifiers that misbehave, in a file of their own so that the helper processes can import them."""

import os
import time


def right(task, trajectory):
    return float(trajectory.answer == task.gold)


def endless(task, trajectory):
    while True:
        pass


def endless_if_wrong(task, trajectory):
    while trajectory.answer != task.gold:
        pass
    return 1.0


def tower(task, trajectory):
    return float(9**9**9**9)


def sleepy(task, trajectory):
    time.sleep(60)
    return 1.0


def broken(task, trajectory):
    raise KeyError("answer")


def dying(task, trajectory):
    os._exit(3)


def greedy(task, trajectory):
    return float(len(bytearray(1 << 40)))


def not_a_number(task, trajectory):
    return float("nan")


def nothing(task, trajectory):
    return None


def noisy(task, trajectory):
    print("x" * 100_000)
    return 0.5


def process_id(task, trajectory):
    return float(os.getpid())
