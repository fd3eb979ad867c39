"""Predictors, recall and load errors in plain loops over what has happened before, written from the definitions.

`experts` is [token][layer] -> chosen experts, -1 where missing; `requests` the request of each token.
"""

import numpy as np


def known(choice):
    return [int(expert) for expert in choice if expert >= 0]


def frequencies(experts, num_experts):
    """Each expert's share of a layer's choices."""
    shares = []
    for layer in range(len(experts[0])):
        chosen = [expert for token in experts for expert in known(token[layer])]
        shares.append([chosen.count(e) / len(chosen) if chosen else 1 / num_experts for e in range(num_experts)])
    return np.array(shares)


def rows(steps, frequency, prior):
    """Of (given, chosen) pairs of choices: a dict of rows by given expert, with that of a missing one at -1."""
    table = {-1: np.array(frequency)}
    for given in range(len(frequency)):
        row = prior * np.array(frequency)
        for one, other in steps:
            if given in known(one):
                for expert in known(other):
                    row[expert] += 1
        table[given] = row / row.sum()
    return table


def token_steps(experts, requests, layer):
    """(choice of a token, choice of the next) in a layer."""
    return [
        (experts[t][layer], experts[t + 1][layer]) for t in range(len(experts) - 1) if requests[t] == requests[t + 1]
    ]


def layer_steps(experts, layer):
    """(choice in the layer before, choice in the layer) of every token; none in the first layer."""
    return [(token[layer - 1], token[layer]) for token in experts] if layer else []


def given_choices(experts, requests, t, layer, relation):
    """What a heatmap looks up for a token and layer."""
    nothing = [-1] * len(experts[t][layer])
    if relation == "token":
        return experts[t - 1][layer] if t and requests[t - 1] == requests[t] else nothing
    return experts[t][layer - 1] if layer else nothing


def before(requests, t):
    """Earlier tokens of the same request."""
    return [s for s in range(t) if requests[s] == requests[t]]


def averaged(experts, requests, t, layer, frequency, rate):
    average = np.array(frequency)
    for s in before(requests, t):
        chosen = known(experts[s][layer])
        if chosen:
            latest = np.array([chosen.count(e) / len(chosen) for e in range(len(frequency))])
            average = (1 - rate) * average + rate * latest
    return average


def counted(experts, tokens, layer, num_experts):
    load = np.zeros(num_experts)
    for s in tokens:
        for expert in known(experts[s][layer]):
            load[expert] += 1
    return load


def prefill_row(experts, requests, prefill, t, layer, given, relation, row, prior):
    """The row of one given expert, counted over the prefill before token t."""
    counts = prior * np.array(row)
    for s in before(requests, t):
        if prefill[s]:
            for one in given_choices(experts, requests, s, layer, relation):
                for expert in known(experts[s][layer]):
                    counts[expert] += one == given
    return counts / counts.sum()


def recall(scores, experts, layer, n):
    """Share of chosen experts among the n of the highest scores, equal ones by number."""
    hits = total = 0
    for token, score in zip(experts, scores, strict=True):
        ranking = sorted(range(score.shape[1]), key=lambda e: (-score[layer][e], e))[:n]
        for expert in known(token[layer]):
            hits, total = hits + (expert in ranking), total + 1
    return hits / total


def load_error(predicted, real, layer):
    errors = [
        np.mean([abs(p - r) for p, r in zip(one[layer], other[layer], strict=True)]) / np.mean(other[layer])
        for one, other in zip(predicted, real, strict=True)
        if sum(other[layer]) > 0
    ]
    return np.mean(errors)
