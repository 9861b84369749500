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
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    for cohort in rounds:
        total, examples = {name: torch.zeros_like(w) for name, w in weights.items()}, 0
        for batches in cohort:
            model.load_state_dict(weights)
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for rows in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            n = sum(len(rows) for rows in batches)
            for name, w in model.state_dict().items():
                total[name] += n * w
            examples += n
        weights = {name: t / examples for name, t in total.items()}
        model.load_state_dict(weights)
        yield weights, accuracy(model, test_x, test_y)
