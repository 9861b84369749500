"""Models: networks described by frozen values (which load no torch), and what they are built into.

>>> from fedrelay import models
>>> model = models.build(models.LeNet5(classes=10), seed=0)
>>> list(model.segments)
['extractor', 'classifier']
"""

from fedrelay.models.build import build, count_parameters
from fedrelay.models.cnn import CNN, CifarCNN, FedAvgCNN, FemnistCNN, LeNet5, ShallowCNN, SmallVGG, SplitCNN
from fedrelay.models.mlp import MLP, DigitsMLP, IntrusionMLP, Logistic, SplitMLP
from fedrelay.models.model import Model, Network, cross_entropy, squared_error
from fedrelay.models.resnet import ResNet18

__all__ = [
    "CNN",
    "MLP",
    "CifarCNN",
    "DigitsMLP",
    "FedAvgCNN",
    "FemnistCNN",
    "IntrusionMLP",
    "LeNet5",
    "Logistic",
    "Model",
    "Network",
    "ResNet18",
    "ShallowCNN",
    "SmallVGG",
    "SplitCNN",
    "SplitMLP",
    "build",
    "count_parameters",
    "cross_entropy",
    "squared_error",
]
