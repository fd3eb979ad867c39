"""Steps of a router with finite buffers, as compiled code: arrivals, allocation of channels, crossbar, and departures.

`jaxmoe.des.routers` states the order of events, and `jaxmoe.des.router_tables` the meaning of the records. All
functions are compiled into the loop of `jaxmoe.des.router_loop`, without reference counts (`_nrt=False`), which would
take most of the time. Numba's cache sees a change here when that file is changed too.
"""

from typing import no_type_check

import numpy as np
from numba import njit
from numba.cpython.unsafe.numbers import trailing_zeros

from jaxmoe.des.router_tables import NOBODY, RETURNS, STORE_AND_FORWARD, TAILS, WORMHOLE


@njit(inline="always", _nrt=False)
@no_type_check
def next_from(mask, pointer):
    """The first set bit of `mask` from `pointer` on, cyclically: round robin."""
    above = (mask >> pointer) << pointer
    return trailing_zeros(above if above != 0 else mask)


@njit(inline="always", _nrt=False)
@no_type_check
def put(net, kind, cycle, item):
    """Schedule an arrival of this kind, a flit, credit or packet, for a later cycle."""
    slot = cycle & (len(net.wheel) - 1)
    count = net.wheel[slot, kind]
    net.wheel[slot, 3 + kind * net.width + count] = item
    net.wheel[slot, kind] = count + 1


@njit(inline="always", _nrt=False)
@no_type_check
def _can_send(net, b, can):
    """Let a buffer request the crossbar, if `can` is true. It is as often false, so the code has no branch."""
    at, port = net.buffer[b].at, net.buffer[b].output
    net.ready[at, port] |= np.int64(can) << net.buffer[b].bit
    net.router[at].sends |= np.int64(can) << port


@njit(inline="always", _nrt=False)
@no_type_check
def _cannot_send(net, b, cannot):
    """End the crossbar request of a buffer, if `cannot` is true."""
    net.ready[net.buffer[b].at, net.buffer[b].output] &= ~(np.int64(cannot) << net.buffer[b].bit)


@njit(inline="always", _nrt=False)
@no_type_check
def _ask(net, b):
    """Request a virtual channel of the next channel for the first packet of a buffer."""
    number = net.ring[b, net.buffer[b].first]
    hop = net.packet[number].hop + 1
    c = net.path[hop, 0]
    port = net.channel[c if c < net.ejection else c + net.packet[number].port].out_port
    net.buffer[b].onward, net.buffer[b].output = hop, port
    at = net.buffer[b].at
    net.waiting[at, port, net.path[hop, 1]] |= np.int64(1) << net.buffer[b].bit
    net.router[at].waits |= np.int64(1) << port


@njit(inline="always", _nrt=False)
@no_type_check
def _front(net, b):
    """Make the next packet of a buffer its first one, and request a virtual channel for it where it may go on."""
    flits = net.packet[net.ring[b, net.buffer[b].first]].flits
    net.buffer[b].left = flits
    if net.switching != STORE_AND_FORWARD or net.buffer[b].count >= flits:
        _ask(net, b)


@njit(inline="always", _nrt=False)
@no_type_check
def arrive(net, b):
    """Add an arrived flit to a buffer."""
    count = net.buffer[b].count + 1
    net.buffer[b].count = count
    net.buffer[b].peak = max(net.buffer[b].peak, count)
    if net.buffer[b].left == 0:
        _front(net, b)
    elif net.buffer[b].to != NOBODY:
        _can_send(net, b, net.buffer[net.buffer[b].to].credits > 0)
    elif net.switching == STORE_AND_FORWARD and count == net.buffer[b].left:
        _ask(net, b)


@njit(inline="always", _nrt=False)
@no_type_check
def give_credit(net, b):
    """Return a credit: the sender to a buffer may send it one more flit."""
    credits, user = net.buffer[b].credits + 1, net.buffer[b].user
    net.buffer[b].credits = credits
    if credits == 1 and user != NOBODY:
        _can_send(net, user, net.buffer[user].count > 0)


@njit(inline="always", _nrt=False)
@no_type_check
def hold(net, b, number, sender):
    """Reserve a buffer for a packet until the packet's tail has been sent there."""
    place, ring = net.buffer[b].first + net.buffer[b].held, net.ring.shape[1]
    net.ring[b, place if place < ring else place - ring] = number
    net.buffer[b].held += 1
    net.buffer[b].user = sender


@njit(inline="always", _nrt=False)
@no_type_check
def fits(net, b, number):
    """Whether a packet may be sent to a buffer: with wormhole switching always, else only if all of it fits."""
    return net.switching == WORMHOLE or net.buffer[b].credits >= net.packet[number].flits


@njit(_nrt=False)
@no_type_check
def _oldest(net, at, mask, pointer):
    """Bit of the buffer in `mask` whose first packet was injected earliest; round robin among equals."""
    best, chosen = np.int64(-1), np.int64(0)
    while mask != 0:
        bit = next_from(mask, pointer)
        mask &= ~(np.int64(1) << bit)
        b = net.bits[at, bit]
        born = net.packet[net.ring[b, net.buffer[b].first]].born
        if best < 0 or born < best:
            best, chosen = born, bit
    return chosen


@njit(inline="always", _nrt=False)
@no_type_check
def _asking(net, at, port, b):
    """The buffers of a router that ask for buffer `b` behind an output."""
    mask = np.int64(0)
    for kind in range(len(net.classes)):
        if (net.classes[kind] >> net.buffer[b].vc) & 1:
            mask |= net.waiting[at, port, kind]
    if net.switching != WORMHOLE:
        left = mask
        while left != 0:
            bit = trailing_zeros(left)
            left &= left - 1
            asking = net.bits[at, bit]
            if not fits(net, b, net.ring[asking, net.buffer[asking].first]):
                mask &= ~(np.int64(1) << bit)
    return mask


@njit(inline="always", _nrt=False)
@no_type_check
def _take(net, at, asking, b):
    """A packet has its next virtual channel: buffer `asking` sends to `b` from now on."""
    number, port = net.ring[asking, net.buffer[asking].first], net.buffer[asking].output
    net.packet[number].hop += 1
    hold(net, b, number, asking)
    net.buffer[asking].to = b
    net.waiting[at, port, net.path[net.buffer[asking].onward, 1]] &= ~(np.int64(1) << net.buffer[asking].bit)
    rest = np.int64(0)
    for kind in range(len(net.classes)):
        rest |= net.waiting[at, port, kind]
    if rest == 0:
        net.router[at].waits &= ~(np.int64(1) << port)
    _can_send(net, asking, net.buffer[b].credits > 0)


@njit(inline="always", _nrt=False)
@no_type_check
def allocate_vcs(net, at, port):
    """Free virtual channels of an output go to buffers that ask for one, by iSLIP. Returns how many."""
    c, one = net.outs[at, port], np.int64(1)
    free, taken, given = net.channel[c].free, np.int64(0), 0
    for iteration in range(net.iterations):
        left, asked = free, np.int64(0)
        while left != 0:  # every free virtual channel grants
            vc = trailing_zeros(left)
            left &= left - 1
            b = c * net.vcs + vc
            mask = _asking(net, at, port, b) & ~taken
            if mask != 0:
                pointer = net.buffer[b].grant
                bit = _oldest(net, at, mask, pointer) if net.oldest else next_from(mask, pointer)
                net.granted[bit] |= one << vc
                asked |= one << bit
        if asked == 0:
            break
        while asked != 0:  # every buffer accepts one
            bit = trailing_zeros(asked)
            asked &= asked - 1
            asking, first = net.bits[at, bit], port * net.vcs
            pointer = net.buffer[asking].accept - first
            vc = next_from(net.granted[bit], pointer if 0 < pointer < net.vcs else 0)
            net.granted[bit] = 0
            b = c * net.vcs + vc
            taken |= one << bit
            free &= ~(one << vc)
            if iteration == 0:
                net.buffer[b].grant = bit + 1 if bit + 1 < net.router[at].in_bits else 0
                net.buffer[asking].accept = first + vc + 1 if first + vc + 1 < net.router[at].out_bits else 0
            _take(net, at, asking, b)
            given += 1
    net.channel[c].free = free
    return given


@njit(inline="always", _nrt=False)
@no_type_check
def switch(net, at):
    """Match inputs with outputs by iSLIP. Returns how many; `net.matched` lists the buffers that send a flit.

    An input sends from the buffer that comes next in turn among those for the output it gets, or from the oldest.
    """
    outputs, taken, number, one = net.router[at].sends, np.int64(0), 0, np.int64(1)
    every = (one << net.vcs) - 1
    for iteration in range(net.iterations):
        left, offered = outputs, np.int64(0)
        while left != 0:  # every output grants
            output = trailing_zeros(left)
            left &= left - 1
            ready = net.ready[at, output]
            if ready == 0:
                net.router[at].sends &= ~(one << output)
            ready &= ~taken
            if ready != 0:
                pointer = net.channel[net.outs[at, output]].grant
                bit = _oldest(net, at, ready, pointer) if net.oldest else next_from(ready, pointer)
                port = np.int64(net.inputs[bit])
                net.granted[port] |= one << output
                offered |= one << port
        if offered == 0:
            break
        while offered != 0:  # every input accepts one
            port = trailing_zeros(offered)
            offered &= offered - 1
            b = net.bits[at, port]
            c = net.buffer[b].channel
            output = next_from(net.granted[port], net.channel[c].accept)
            net.granted[port] = 0
            if iteration == 0:
                grant, accept = port + net.vcs, output + 1
                net.channel[net.outs[at, output]].grant = grant if grant < net.router[at].in_bits else 0
                net.channel[c].accept = accept if accept * net.vcs < net.router[at].out_bits else 0
            taken |= every << port
            outputs &= ~(one << output)
            mask, turn = (net.ready[at, output] >> port) & every, net.channel[c].turn
            vc = _oldest(net, at, mask << port, port + turn) - port if net.oldest else next_from(mask, turn)
            net.matched[number] = b + vc
            number += 1
    return number


@njit(inline="always", _nrt=False)
@no_type_check
def send(net, b, now, leaves):
    """A buffer sends a flit, which leaves the router in cycle `leaves` or as soon as its channel is free after it."""
    to, c = net.buffer[b].to, net.buffer[b].channel
    out, first = net.buffer[to].channel, net.buffer[b].first
    turn, left = net.buffer[b].vc + 1, net.buffer[b].left - 1
    net.channel[c].turn = turn if turn < net.vcs else 0
    credits, count = net.buffer[to].credits - 1, net.buffer[b].count - 1
    net.buffer[to].credits, net.buffer[b].count, net.buffer[b].left = credits, count, left
    _cannot_send(net, b, (left == 0) | (count == 0) | (credits == 0))
    depart = max(float(leaves), net.channel[out].free_at)
    net.channel[out].free_at = depart + net.channel[out].period
    if len(net.record) > 0:
        note(net, net.ring[b, first], net.buffer[b].onward, left, depart, net.channel[out].free_at)
    whole = np.int64(np.ceil(depart))
    put(net, net.channel[out].brings, whole + net.channel[out].after, to)
    back = max(now, net.channel[c].credit_at)
    net.channel[c].credit_at = back + 1
    put(net, RETURNS, back + net.channel[c].credit, b)
    if left == 0:
        if net.channel[out].sink < 0:
            put(net, TAILS, whole + net.channel[out].wire, net.ring[b, first])
            net.buffer[to].held = 0
        net.channel[out].free |= np.int64(1) << net.buffer[to].vc
        net.buffer[to].user = NOBODY
        net.buffer[b].first = first + 1 if first + 1 < net.ring.shape[1] else 0
        net.buffer[b].held -= 1
        net.buffer[b].to = NOBODY
        if count > 0:
            _front(net, b)


@njit(inline="always", _nrt=False)
@no_type_check
def note(net, number, hop, left, begin, end):
    """Record when a packet's first flit takes a channel and when its last one has passed it."""
    place = net.packet[number].place + net.path[hop, 2]
    if left + 1 == net.packet[number].flits:
        net.record[place, 0] = begin
    if left == 0:
        net.record[place, 1] = end


@njit(inline="always", _nrt=False)
@no_type_check
def step(net, at, now, leaves):
    """One step of a router: both allocations start from what was known before it. Returns how much has moved."""
    number = switch(net, at)
    moved, waits = number, net.router[at].waits
    while waits != 0:
        port = trailing_zeros(waits)
        waits &= waits - 1
        if net.channel[net.outs[at, port]].free != 0:
            moved += allocate_vcs(net, at, port)
    for index in range(number):
        send(net, net.matched[index], now, leaves)
    return moved
