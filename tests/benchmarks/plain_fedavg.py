"""FedAvg in plain PyTorch. Who trains and on which batches is handed over, so that nothing is left to chance."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


def mlp(*widths):
    layers = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def fedavg(model, x, y, test_x, test_y, rounds, rate):
    """``rounds``: of each round, of each client, of each batch: the rows of x. Yields the weights and the test accuracy."""
    weights = [p.detach().clone() for p in model.parameters()]
    for cohort in rounds:
        sums, examples = [torch.zeros_like(w) for w in weights], 0
        for batches in cohort:
            with torch.no_grad():
                for p, w in zip(model.parameters(), weights):
                    p.copy_(w)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for rows in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            n = sum(len(rows) for rows in batches)
            sums = [s + n * p.detach() for s, p in zip(sums, model.parameters())]
            examples += n
        weights = [s / examples for s in sums]
        with torch.no_grad():
            for p, w in zip(model.parameters(), weights):
                p.copy_(w)
        yield weights, accuracy(model, test_x, test_y)
