"""Task allocation and the price of fetched experts, one block, one slice, one hop at a time."""

import math

import numpy as np

READING = ("overlapped", "homes", "ascending")


def algorithm_1(counts, holders, home, hops, dram, hop, request, block, spare, reading=READING):
    """Algorithm 1 as it is printed; ties to the lowest die. Returns requests [expert, die].

    `reading` says what the text leaves open: the cost, the workload at first, the order.
    """
    experts, dies = holders.shape
    counts, holders, home, hops = (np.asarray(each).tolist() for each in (counts, holders, home, hops))
    plan = np.zeros((experts, dies), int)
    reads, hopped, load = [0] * dies, [0] * dies, [0] * dies
    cost_of, begin, order = reading
    if begin == "homes":
        for expert in range(experts):
            reads[home[expert]] += counts[expert] > 0
            load[home[expert]] += counts[expert]
    turns = [*range(experts)] if order == "number" else sorted(range(experts), key=lambda e: (counts[e], e))
    for expert in turns:
        if begin == "homes":
            reads[home[expert]] -= counts[expert] > 0
            load[home[expert]] -= counts[expert]
        local = [die for die in range(dies) if holders[expert][die]]
        candidates = [die for die in range(dies) if min(hops[other][die] for other in local) <= 1]
        candidates.sort(key=lambda die: (load[die], die))
        candidates = sorted(candidates[: math.ceil(counts[expert] / block) + spare])
        left, start = counts[expert], list(load)
        while left > 0:
            size = min(left, block)
            best, cheapest = -1, math.inf
            for die in candidates:
                away = 0 if holders[expert][die] else hops[home[expert]][die]
                moved = (reads[die] + 1) * dram + (hopped[die] + away) * hop
                computed = (load[die] + size) * request
                cost = max(moved, computed) if cost_of == "overlapped" else moved + computed
                if cost < cheapest:
                    best, cheapest = die, cost
            plan[expert, best] += size
            load[best] += size
            left -= size
        for die in range(dies):
            if load[die] > start[die]:
                reads[die] += 1
                hopped[die] += 0 if holders[expert][die] else hops[home[expert]][die]
    return plan


def dealt(counts, dies, block):
    """Blocks to one die after the other."""
    plan, turn = np.zeros((len(counts), dies), int), 0
    for expert, count in enumerate(counts):
        left = int(count)
        while left > 0:
            plan[expert, turn % dies] += min(left, block)
            left -= block
            turn += 1
    return plan


def traffic(shape, requests, home, local, copied, expert_bytes, slices):
    """Hops, bytes by source, and bytes of every link (as (from, to)) and HBM channel, slice by slice along XY paths."""
    found = {"hops": 0, "local_read": 0.0, "remote_read": 0.0, "local_write": 0.0}
    links, channels = {}, np.zeros(shape[0] * shape[1])
    for expert, die in zip(*np.nonzero(requests), strict=True):
        for _ in range(slices):
            size = expert_bytes / slices
            if local[expert, die]:
                found["local_read"] += size
                channels[die] += size
                continue
            found["remote_read"] += size
            channels[home[expert]] += size
            x, y = divmod(int(home[expert]), shape[1])
            to_x, to_y = divmod(int(die), shape[1])
            while (x, y) != (to_x, to_y):
                step = (x + (1 if to_x > x else -1), y) if x != to_x else (x, y + (1 if to_y > y else -1))
                key = (x * shape[1] + y, step[0] * shape[1] + step[1])
                links[key] = links.get(key, 0.0) + size
                found["hops"] += 1
                x, y = step
            if copied[expert, die]:
                found["local_write"] += size
                channels[die] += size
    return found, links, channels
