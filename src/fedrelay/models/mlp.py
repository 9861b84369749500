"""Networks without convolutions: fully connected layers, and none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrelay.models.layers import cut, dense, each, whole, wholes
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from torch import nn

    from fedrelay.models.layers import Layers


@value
class MLP:
    """Fully connected layers; the rows are flattened first, the outputs are logits.

    The layers are called ``fc1, fc2 ...`` across both segments, which begin and end where ``cut`` says.

    >>> for name, segment in MLP(inputs=4, hidden=(3,), classes=2).segments().items():
    ...     print(name, *dict(segment.named_children()))
    extractor flatten fc1 fc1_relu
    classifier fc2
    >>> MLP(activation="rellu").segments()
    Traceback (most recent call last):
    ValueError: MLP: activation must be one of relu, tanh, gelu, sigmoid, none, not 'rellu'; did you mean 'relu'?
    """

    inputs: int = 784
    """Numbers in a row, after flattening."""
    hidden: tuple[int, ...] = (32,)
    classes: int = 10
    activation: str | tuple[str, ...] = "relu"
    """After each hidden layer: one word for all, or one per layer."""
    cut: str = "last"
    """The layer that opens the second segment; ``"last"``: all hidden layers are the extractor."""
    names: tuple[str, ...] = ("extractor", "classifier")
    """What the two segments are called."""

    def check(self) -> None:
        """Raise one sentence if a number makes no sense."""
        whole(self, inputs=self.inputs, classes=self.classes)
        wholes(self, hidden=self.hidden)
        each(self, self.activation, len(self.hidden))

    def layers(self) -> Layers:
        """All layers in order, by name."""
        from torch import nn

        self.check()
        widths = (self.inputs, *self.hidden, self.classes)
        return [("flatten", nn.Flatten()), *dense(widths, each(self, self.activation, len(self.hidden)))]

    def segments(self) -> dict[str, nn.Module]:
        """Fresh layers, drawn from torch's present random state."""
        return cut(self, self.layers(), self.cut, self.names)


@value
class DigitsMLP(MLP):
    """The network of WFSL for MNIST: 784-32-32-32-10, 27,562 parameters."""

    hidden: tuple[int, ...] = (32, 32, 32)


@value
class IntrusionMLP(MLP):
    """The network of WFSL for the intrusions of KDD: 41-288 (tanh)-120 (ReLU)-23, 49,559 parameters.

    Its outputs are logits; the released code's dropout and second softmax are left out.
    """

    inputs: int = 41
    hidden: tuple[int, ...] = (288, 120)
    classes: int = 23
    activation: str | tuple[str, ...] = ("tanh", "relu")


@value
class SplitMLP(MLP):
    """The network of two-stage SplitFed (2LS) for MNIST: 784-1024-1024 on the device | 1024-1024-10 on a server.

    ReLU follows every hidden layer; 1,853,440 and 1,059,850 parameters.

    >>> [*SplitMLP().segments()], [*SplitMLP(cut="fc2").segments()["client"]._modules]
    (['client', 'server'], ['flatten', 'fc1', 'fc1_relu'])
    """

    hidden: tuple[int, ...] = (1024, 1024, 1024)
    cut: str = "fc3"
    names: tuple[str, ...] = ("client", "server")


@value
class Logistic:
    """Multinomial logistic regression: a classifier behind an extractor that only flattens.

    >>> Logistic(inputs=2, classes=3).segments()["classifier"]
    Sequential(
      (fc1): Linear(in_features=2, out_features=3, bias=True)
    )
    """

    inputs: int = 784
    classes: int = 10

    def check(self) -> None:
        """Raise one sentence if a number makes no sense."""
        whole(self, inputs=self.inputs, classes=self.classes)

    def segments(self) -> dict[str, nn.Module]:
        """Fresh layers, drawn from torch's present random state."""
        self.check()
        return MLP(self.inputs, (), self.classes).segments()
