"""Flows that run several rounds and wait for each other, as the steps of a ring do: when the last one has arrived.

A flow passes on in one round what another brought in the round before. It waits for that, and for the links and ports
on its way, which serve it and all others that they carry once a round; it does not wait for the others' rounds to end.

A step that takes `alone` s on the slowest link of its way arrives `delay` s after that, and the busiest part of its way
is at work for `shared` s in each round. So a step begins

    begin[f, 0] = shared[f] - alone[f],                       behind those that it meets
    begin[f, r] = max(begin[f, r - 1] + shared[f],            when its way is free again
                      begin[c, r - 1] + alone[c] + delay[c])  when what it passes on is there, c = chain[f]

and the last of R rounds ends at the largest begin[f, R - 1] + alone[f] + delay[f]. That is exact where steps meet no
others, whatever their links; and in rings both ways round a switch, where each node's link serves one step each way.
Steps that meet others on several links may wait for them more than once.

By hand, four nodes round a switch whose links take 3 us for a step, both ways, 3 rounds: each link is at work for 6 us
of a round. With a delay of 1 us it is never idle, and the last step arrives after 3 x 6 + 1 = 19 us. With a delay of
5 us a step each way goes round in 3 x (3 + 5) us, and one begins behind the other: 27 us. If all nodes waited for each
other after every round, these would be 3 x (6 + 1) = 21 and 3 x (6 + 5) = 33 us.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.relax import largest


def chain_delay(
    alone: Float[Array, " flow"],
    shared: Float[Array, " flow"],
    delay: Float[Array, " flow"],
    chain: Int[Array, " flow"],
    rounds: Float[Array, ""] | int,
    most_rounds: int,
) -> Float[Array, ""]:
    """Seconds of all rounds beyond those in which the busiest link or port is at work, divided by the rounds.

    All times are of one round, s. `rounds` may be traced, so `most_rounds` of them are gone through.
    """
    busiest = largest(shared)
    passed_on, again = alone + delay - busiest, shared - busiest  # what a round takes more than that of the busiest

    def one_round(begin: Float[Array, " flow"], number: Int[Array, ""]) -> tuple[Float[Array, " flow"], None]:
        later = jnp.maximum(begin + again, (begin + passed_on)[chain])
        return jnp.where(number < rounds, later, begin), None

    begin, _ = jax.lax.scan(one_round, shared - alone, jnp.arange(1, most_rounds))
    return largest(begin + passed_on) / jnp.maximum(rounds, 1)
