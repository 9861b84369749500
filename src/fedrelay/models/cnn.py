"""Convolutional networks: blocks of convolutions that end in a max-pool, then fully connected layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrelay.models.layers import NORMS, STARTS, activated, cut, dense, each, normalisation, one_of, whole, wholes, xavier
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from torch import nn

    from fedrelay.models.layers import Layers


@value
class CNN:
    """Blocks of convolutions, each closed by a 2x2 max-pool, then fully connected layers; the outputs are logits.

    The layers are called ``conv1, conv2 ... fc1, fc2 ...`` across both segments, which begin and end where ``cut`` says.
    Images of another size need only another ``image``; any network here splits between a device and a server.

    >>> split = CNN(image=(1, 28, 28), norm="group", cut="conv2", names=("client", "server"))
    >>> for name, segment in split.segments().items():
    ...     print(name, *dict(segment.named_children()))
    client conv1 conv1_norm conv1_relu pool1
    server conv2 conv2_norm conv2_relu pool2 flatten fc1 fc1_relu fc2
    >>> CNN(cut="conv3").segments()
    Traceback (most recent call last):
    ValueError: CNN: cut must be one of last, conv2, fc1, fc2, not 'conv3'; did you mean 'conv2'?
    """

    classes: int = 10
    norm: str = "none"
    """After each convolution: ``"none"``, ``"group"`` (GroupNorm) or ``"batch"`` (BatchNorm)."""
    image: tuple[int, ...] = (3, 32, 32)
    """Channels, height and width of a row."""
    channels: tuple[int, ...] = (32, 64)
    """The width of each block."""
    depth: int = 1
    """Convolutions in each block."""
    kernel: int = 3
    padding: int = 1
    hidden: tuple[int, ...] = (128,)
    """The widths of the fully connected layers but the last."""
    activation: str | tuple[str, ...] = "relu"
    """After each layer but the last: one word for all, or one per convolution and hidden layer."""
    init: str = "torch"
    """Where the weights start: ``"torch"`` (its own default) or ``"xavier"`` (Glorot's uniform, zero biases)."""
    cut: str = "last"
    """The layer that opens the second segment; ``"last"``: the classifier is the last layer."""
    names: tuple[str, ...] = ("extractor", "classifier")
    """What the two segments are called."""

    def check(self) -> None:
        """Raise one sentence if a number makes no sense."""
        whole(self, classes=self.classes, depth=self.depth, kernel=self.kernel)
        whole(self, least=0, padding=self.padding)
        wholes(self, least=3, most=3, image=self.image)
        wholes(self, least=1, channels=self.channels)
        wholes(self, hidden=self.hidden)
        one_of(self, NORMS, norm=self.norm)
        one_of(self, STARTS, init=self.init)
        self._activations()
        self._flat()

    def layers(self) -> Layers:
        """All layers in order, by name."""
        from torch import nn

        self.check()
        words, before, i = self._activations(), self.image[0], 0
        made: Layers = []
        for block, width in enumerate(self.channels, 1):
            for _ in range(self.depth):
                i += 1
                # A norm subtracts any bias again, so a convolution before one has none.
                conv = nn.Conv2d(before, width, self.kernel, padding=self.padding, bias=self.norm == "none")
                made.append((f"conv{i}", conv))
                if self.norm != "none":
                    made.append((f"conv{i}_norm", normalisation(self.norm, width)))
                made += activated(f"conv{i}", words[i - 1])
                before = width
            made.append((f"pool{block}", nn.MaxPool2d(2)))
        made += [("flatten", nn.Flatten()), *dense((self._flat(), *self.hidden, self.classes), words[i:])]
        if self.init == "xavier":
            xavier(module for _, module in made)
        return made

    def segments(self) -> dict[str, nn.Module]:
        """Fresh layers, drawn from torch's present random state."""
        return cut(self, self.layers(), self.cut, self.names)

    def _activations(self) -> tuple[str, ...]:
        return each(self, self.activation, self.depth * len(self.channels) + len(self.hidden))

    def _flat(self) -> int:
        """The numbers that the last pool leaves of a row."""
        height, width = self.image[1:]
        grown = self.depth * (2 * self.padding - self.kernel + 1)  # what a block's convolutions add to a side
        for block in range(1, len(self.channels) + 1):
            height, width = height + grown, width + grown
            if min(height, width) < 2:
                size = "x".join(map(str, self.image))
                raise ValueError(f"{type(self).__name__}: image {size} is too small: nothing is left to pool in block {block}")
            height, width = height // 2, width // 2
        return self.channels[-1] * height * width


@value
class CifarCNN(CNN):
    """The network of WFSL for CIFAR-10: convolutions of 32, 64, 128 and 2048-512-10, 1,147,466 parameters."""

    channels: tuple[int, ...] = (32, 64, 128)
    hidden: tuple[int, ...] = (512,)


@value
class LeNet5(CNN):
    """The network of FedSeq (Hsu et al., 2019): two convolutions of 64, 5x5 without padding, and 1600-384-192-classes.

    797,962 parameters for 10 classes, 815,332 for 100. The classifier is *all three* fully connected layers, so that
    FedSeq's signatures are leaves of one segment: ``classifier.fc3.weight`` (the last one), ``classifier.fc2.weight``
    with it (the last two), and ``classifier.fc1.weight`` (all). ``cut="last"`` makes it the last layer alone.

    >>> [*LeNet5().segments()["classifier"].state_dict()][::2]
    ['fc1.weight', 'fc2.weight', 'fc3.weight']
    """

    channels: tuple[int, ...] = (64, 64)
    kernel: int = 5
    padding: int = 0
    hidden: tuple[int, ...] = (384, 192)
    cut: str = "fc1"


@value
class FedAvgCNN(CNN):
    """The MNIST CNN of McMahan et al. (2017): convolutions of 32 and 64, 5x5, and 3136-512-10, 1,663,370 parameters."""

    image: tuple[int, ...] = (1, 28, 28)
    kernel: int = 5
    padding: int = 2
    hidden: tuple[int, ...] = (512,)


@value
class FemnistCNN(CNN):
    """The network of HFedMS for FEMNIST: convolutions of 32 and 64, 5x5, 3136-2048-100 | 100-62.

    6,687,834 parameters, 6,262 of them in the classifier (Table I). A row's semantic feature is what the extractor
    returns: 100 numbers after ReLU. The weights start as in the released code.
    """

    classes: int = 62
    image: tuple[int, ...] = (1, 28, 28)
    kernel: int = 5
    padding: int = 2
    hidden: tuple[int, ...] = (2048, 100)
    init: str = "xavier"


@value
class SplitCNN(CNN):
    """The network of two-stage SplitFed (2LS) for CIFAR-10: two convolutions on the device | one and four layers on a server.

    Convolutions of 64, 128 (75,648 parameters; 128x8x8 numbers cross the cut) | 256, then 4096-1024-512-256-10
    (5,149,194). ReLU after every hidden layer, a max-pool after every convolution, no dropout.
    """

    channels: tuple[int, ...] = (64, 128, 256)
    hidden: tuple[int, ...] = (1024, 512, 256)
    cut: str = "conv3"
    names: tuple[str, ...] = ("client", "server")


@value
class ShallowCNN(CNN):
    """The network of Genetic CFL for MNIST: one convolution of 32, *not* activated, and 5408-128-10, 693,962 parameters."""

    image: tuple[int, ...] = (1, 28, 28)
    channels: tuple[int, ...] = (32,)
    padding: int = 0
    activation: str | tuple[str, ...] = ("none", "relu")
    init: str = "xavier"


@value
class SmallVGG(CNN):
    """The network of Genetic CFL for CIFAR-10: pairs of convolutions of 32, 64, 128 and 2048-128-10, 550,570 parameters."""

    channels: tuple[int, ...] = (32, 64, 128)
    depth: int = 2
    init: str = "xavier"
