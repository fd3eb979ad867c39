"""Input-queued routers with virtual channels and credits, cycle by cycle with plain objects, and what has to hold.

Written from the description in `jaxmoe.des.routers` alone. Flits are objects that move from queue to queue; nothing is
remembered of who may move: every cycle looks at everything again.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Packet:
    number: int
    path: list  # channels, in order
    allowed: list  # virtual channels on each of them
    flits: int
    after: list = field(default_factory=list)  # packets that have to be delivered first
    begun: int | None = None
    finish: int | None = None


@dataclass
class Buffer:
    """One virtual channel: what is in it, who it is for, and whether its first packet has a place to go."""

    flits: deque = field(default_factory=deque)  # (packet, number of the flit)
    arrived: list = field(default_factory=list)  # every flit that ever came
    credits: int = 0  # at the sender
    taken: bool = False  # between the first and the last flit of a packet at its sender
    to: tuple | None = None  # channel and virtual channel that the first packet has got
    grant: int = 0
    accept: int = 0


@dataclass
class Network:
    """`channels[c]` = (router or None, router or None, wire); the inputs and outputs of routers in order of ports."""

    channels: list
    inputs: dict
    outputs: dict
    vcs: int
    size: int
    iterations: int = 1
    speedup: int = 1
    credit_delay: int = 1
    switching: str = "wormhole"
    oldest: bool = False


def turn(candidates, pointer, count, age=None):
    """The first candidate at or after the pointer; with ages the oldest, and of equals that one."""
    return min(candidates, key=lambda c: ((age(c) if age else 0), (c - pointer) % count))


class Simulation:
    def __init__(self, net, packets):
        self.net, self.packets, self.now = net, packets, 0
        self.buffer = {(c, v): Buffer(credits=net.size) for c in range(len(net.channels)) for v in range(net.vcs)}
        self.events = defaultdict(list)
        self.turns = defaultdict(int)  # of inputs among virtual channels
        self.grants, self.accepts = defaultdict(int), defaultdict(int)  # of outputs and inputs in the switch
        self.sends_from, self.credit_from = defaultdict(int), defaultdict(int)  # when channels are free
        self.last_vc, self.sending = {}, {}
        self.waiting = {c: deque() for c, (source, _, _) in enumerate(net.channels) if source is None}
        self.released = set()

    def run(self, most=100_000):
        """Until all is delivered: cycles, or None where nothing moves any more."""
        while self.now < most:
            events = self.events.pop(self.now, [])
            for kind, *what in sorted(events, key=lambda e: e[0]):
                getattr(self, kind)(*what)
            self.check()
            if all(p.finish is not None for p in self.packets):
                return self.now
            self.release()
            moved = sum(self.inject(c) for c in self.waiting)
            for half in range(self.net.speedup):
                leaves = self.now if half + 1 < self.net.speedup else self.now + 1
                for router in self.net.inputs:
                    moved += self.step(router, leaves)
            self.now += 1
            if not moved and not self.events:
                return None
        raise AssertionError("no end")

    def check(self):
        """No buffer over its size, credits conserved, packets in one piece and in order in every virtual channel."""
        away = defaultdict(int)
        for events in self.events.values():
            for kind, *what in events:
                if kind in ("a_arrive", "credit"):
                    away[what[0]] += 1
                if kind == "b_eject":
                    away[what[2]] += 1
        for key, buffer in self.buffer.items():
            assert len(buffer.flits) <= self.net.size
            assert buffer.credits + len(buffer.flits) + away[key] == self.net.size
            for (packet, flit), (then, following) in pairwise(buffer.arrived):
                last = flit + 1 == packet.flits
                assert (then is not packet and following == 0) if last else (then is packet and following == flit + 1)

    # What happens.

    def a_arrive(self, key, packet, flit):
        self.buffer[key].flits.append((packet, flit))
        self.buffer[key].arrived.append((packet, flit))

    def b_eject(self, packet, flit, key):
        wire = self.net.channels[key[0]][2]
        self.events[self.now + wire + self.net.credit_delay].append(("credit", key))
        if flit + 1 == packet.flits:
            packet.finish = self.now

    def credit(self, key):
        self.buffer[key].credits += 1

    def release(self):
        for packet in self.packets:
            if packet.number not in self.released and all(p.finish is not None for p in packet.after):
                self.released.add(packet.number)
                self.waiting[packet.path[0]].append(packet)

    # Nodes.

    def inject(self, c):
        if c not in self.sending:
            if not self.waiting[c]:
                return False
            packet, last = self.waiting[c][0], self.last_vc.get(c)
            order = [0] if last is None else [(last + i) % self.net.vcs for i in range(1, self.net.vcs + 1)]
            free = [v for v in order if self.may_take((c, v), packet) and self.buffer[c, v].credits > 0]
            if not free:
                return False
            self.waiting[c].popleft()
            self.last_vc[c], self.sending[c], packet.begun = free[0], [packet, 0, free[0]], self.now
            self.buffer[c, free[0]].taken = True
        packet, flit, v = self.sending[c]
        buffer = self.buffer[c, v]
        if buffer.credits == 0:
            return False
        buffer.credits -= 1
        self.events[self.now + self.net.channels[c][2]].append(("a_arrive", (c, v), packet, flit))
        self.sending[c][1] += 1
        if flit + 1 == packet.flits:
            del self.sending[c]
            buffer.taken = False
        return True

    def may_take(self, key, packet):
        """Whether a virtual channel can be given to a packet."""
        buffer = self.buffer[key]
        return not buffer.taken and (self.net.switching == "wormhole" or buffer.credits >= packet.flits)

    # Routers.

    def step(self, router, leaves):
        sends = self.match_switch(router)
        taken = self.match_vcs(router)
        for key, to in taken:
            self.buffer[key].to, self.buffer[to].taken = to, True
        for key in sends:
            self.send(key, leaves)
        return len(sends) + len(taken)

    def match_switch(self, router):
        """Buffers that send a flit in this step."""
        ins, outs = self.net.inputs[router], self.net.outputs[router]
        asks = defaultdict(list)  # [input port, output port] virtual channels
        for i, c in enumerate(ins):
            for v in range(self.net.vcs):
                buffer = self.buffer[c, v]
                if buffer.flits and buffer.to is not None and self.buffer[buffer.to].credits > 0:
                    asks[i, outs.index(buffer.to[0])].append(v)

        def age(i, o=None):
            return min(self.buffer[ins[i], v].flits[0][0].begun for v in asks[i, o])

        matched = {}
        for iteration in range(self.net.iterations):
            offers = defaultdict(list)
            for o in range(len(outs)):
                wants = [i for i in range(len(ins)) if asks.get((i, o)) and i not in matched]
                if wants and o not in matched.values():
                    old = (lambda i, o=o: age(i, o)) if self.net.oldest else None
                    offers[turn(wants, self.grants[router, o], len(ins), old)].append(o)
            for i, offered in offers.items():
                o = matched[i] = turn(offered, self.accepts[router, i], len(outs))
                if iteration == 0:
                    self.grants[router, o], self.accepts[router, i] = (i + 1) % len(ins), (o + 1) % len(outs)
        sends = []
        for i, o in matched.items():
            old = (lambda v, i=i: self.buffer[ins[i], v].flits[0][0].begun) if self.net.oldest else None
            v = turn(asks[i, o], self.turns[ins[i]], self.net.vcs, old)
            self.turns[ins[i]] = (v + 1) % self.net.vcs
            sends.append((ins[i], v))
        return sends

    def match_vcs(self, router):
        """Buffers whose first packet gets a virtual channel, and which."""
        ins, outs, vcs = self.net.inputs[router], self.net.outputs[router], self.net.vcs
        first = {}
        for i, c in enumerate(ins):
            for v in range(vcs):
                flits = self.buffer[c, v].flits
                if flits and flits[0][1] == 0 and self.buffer[c, v].to is None:
                    packet = flits[0][0]
                    whole = sum(p is packet for p, _ in flits) == packet.flits
                    if self.net.switching != "store_and_forward" or whole:
                        first[i * vcs + v] = packet
        taken, used = {}, set()
        for iteration in range(self.net.iterations):
            offers = defaultdict(list)
            for o, c in enumerate(outs):
                for v in range(vcs):
                    wants = [
                        x
                        for x, p in first.items()
                        if x not in taken
                        and p.path[p.path.index(ins[x // vcs]) + 1] == c
                        and v in p.allowed[p.path.index(c)]
                        and self.may_take((c, v), p)
                    ]
                    if wants and (c, v) not in used:
                        old = (lambda x: first[x].begun) if self.net.oldest else None
                        chosen = turn(wants, self.buffer[c, v].grant, len(ins) * vcs, old)
                        offers[chosen].append(o * vcs + v)
            for x, offered in offers.items():
                asking = self.buffer[ins[x // vcs], x % vcs]
                y = turn(offered, asking.accept, len(outs) * vcs)
                key = (outs[y // vcs], y % vcs)
                taken[x] = key
                used.add(key)
                if iteration == 0:
                    self.buffer[key].grant = (x + 1) % (len(ins) * vcs)
                    asking.accept = (y + 1) % (len(outs) * vcs)
        return [((ins[x // vcs], x % vcs), key) for x, key in taken.items()]

    def send(self, key, leaves):
        buffer, c = self.buffer[key], key[0]
        packet, flit = buffer.flits.popleft()
        to = buffer.to
        self.buffer[to].credits -= 1
        _, sink, wire = self.net.channels[to[0]]
        depart = max(leaves, self.sends_from[to[0]])
        self.sends_from[to[0]] = depart + 1
        if sink is None:
            self.events[depart + wire].append(("b_eject", packet, flit, to))
        else:
            self.events[depart + wire].append(("a_arrive", to, packet, flit))
        back = max(self.now, self.credit_from[c])
        self.credit_from[c] = back + 1
        source, _, wire = self.net.channels[c]
        self.events[back + wire + (self.net.credit_delay if source is not None else 0)].append(("credit", key))
        if flit + 1 == packet.flits:
            buffer.to, self.buffer[to].taken = None, False
