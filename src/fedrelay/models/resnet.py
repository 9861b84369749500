"""ResNet-18 for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrelay.models.layers import cut, normalisation, one_of, whole, wholes
from fedrelay.seam.values import value

if TYPE_CHECKING:
    from torch import nn

    from fedrelay.models.layers import Layers


@value
class ResNet18:
    """ResNet-18 (He et al., 2016) with the CIFAR stem: one 3x3 convolution of stride 1 and no pool; 11,173,962 parameters.

    GroupNorm is the default, as usual in federated learning: the means that BatchNorm keeps are those of one client.

    >>> for name, segment in ResNet18(classes=100).segments().items():
    ...     print(name, *dict(segment.named_children()))
    extractor conv1 conv1_norm conv1_relu layer1 layer2 layer3 layer4 pool flatten
    classifier fc
    """

    classes: int = 10
    norm: str = "group"
    """``"group"`` (GroupNorm) or ``"batch"`` (BatchNorm); without a norm it does not train."""
    image: tuple[int, ...] = (3, 32, 32)
    """Channels, height and width of a row; any height and width will do."""
    cut: str = "last"
    """The layer that opens the second segment, such as ``"layer2"``; ``"last"``: the classifier is the last layer."""
    names: tuple[str, ...] = ("extractor", "classifier")
    """What the two segments are called."""

    def check(self) -> None:
        """Raise one sentence if a number makes no sense."""
        whole(self, classes=self.classes)
        wholes(self, least=3, most=3, image=self.image)
        one_of(self, ("group", "batch"), norm=self.norm)

    def layers(self) -> Layers:
        """All layers in order, by name."""
        from torch import nn

        from fedrelay.models.residual import Residual

        self.check()
        made: Layers = [
            ("conv1", nn.Conv2d(self.image[0], 64, 3, padding=1, bias=False)),
            ("conv1_norm", normalisation(self.norm, 64)),
            ("conv1_relu", nn.ReLU()),
        ]
        for i, (before, width, stride) in enumerate([(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)], 1):
            pair = nn.Sequential(Residual(before, width, stride, self.norm), Residual(width, width, 1, self.norm))
            made.append((f"layer{i}", pair))
        return [*made, ("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(512, self.classes))]

    def segments(self) -> dict[str, nn.Module]:
        """Fresh layers, drawn from torch's present random state."""
        return cut(self, self.layers(), self.cut, self.names)
