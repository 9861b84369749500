"""The networks: their parameter counts, layers and cuts, and what they say to numbers that make no sense."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedrelay import models
from fedrelay.models import (
    CNN,
    MLP,
    CifarCNN,
    DigitsMLP,
    FedAvgCNN,
    FemnistCNN,
    IntrusionMLP,
    LeNet5,
    Logistic,
    ResNet18,
    ShallowCNN,
    SmallVGG,
    SplitCNN,
    SplitMLP,
    build,
    count_parameters,
    cross_entropy,
)
from fedrelay.models.residual import Residual
from fedrelay.seam.codec import Store, decode, encode

# network, parameters of its two segments, numbers that cross the cut for one row
COUNTED = [
    (MLP(), 784 * 32 + 32, 32 * 10 + 10, (32,)),
    (DigitsMLP(), 27_562 - 330, 330, (32,)),
    (IntrusionMLP(), 49_559 - 2_783, 2_783, (120,)),
    (SplitMLP(), 1_853_440, 1_059_850, (1024,)),
    (Logistic(), 0, 7_850, (784,)),
    (CifarCNN(), 1_147_466 - 5_130, 5_130, (512,)),
    (LeNet5(), 797_962 - 690_634, 690_634, (1600,)),
    (LeNet5(classes=100), 815_332 - 708_004, 708_004, (1600,)),
    # Each of the 64 + 64 biases gives way to a norm's weight and bias.
    (LeNet5(norm="group"), 797_962 - 690_634 + 128, 690_634, (1600,)),
    (LeNet5(norm="batch"), 797_962 - 690_634 + 128, 690_634, (1600,)),
    (FemnistCNN(), 6_687_834 - 6_262, 6_262, (100,)),
    (SplitCNN(), 75_648, 5_149_194, (128, 8, 8)),
    (ShallowCNN(), 693_962 - 1_290, 1_290, (128,)),
    (SmallVGG(), 550_570 - 1_290, 1_290, (128,)),
    (FedAvgCNN(), 1_663_370 - 5_130, 5_130, (512,)),
    (ResNet18(), 11_173_962 - 5_130, 5_130, (512,)),
    (ResNet18(norm="batch"), 11_173_962 - 5_130, 5_130, (512,)),
]
NETWORKS = [network for network, *_ in COUNTED]


def rows(network: object, n: int = 2) -> torch.Tensor:
    shape = getattr(network, "image", None) or (network.inputs,)
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(7))


def layers(network: object, segment: str) -> list[str]:
    return [*dict(network.segments()[segment].named_children())]


@pytest.mark.parametrize(("network", "first", "second", "_"), COUNTED, ids=repr)
def test_parameter_counts_are_those_of_the_papers(network, first, second, _):
    assert [*count_parameters(network).values()] == [first, second]


@pytest.mark.parametrize(
    ("network", "total"),
    [
        (DigitsMLP(), 27_562),
        (IntrusionMLP(), 49_559),
        (CifarCNN(), 1_147_466),
        (LeNet5(), 797_962),
        (LeNet5(classes=100), 815_332),
        (FemnistCNN(), 6_687_834),
        (ShallowCNN(), 693_962),
        (SmallVGG(), 550_570),
        (FedAvgCNN(), 1_663_370),
        (ResNet18(), 11_173_962),
    ],
    ids=repr,
)
def test_a_built_model_holds_the_published_total(network, total):
    model = build(network, seed=0)
    assert sum(model.initial()[leaf].numel() for leaf in model.scope()) == total


@pytest.mark.parametrize(("network", "_", "__", "crossing"), COUNTED, ids=repr)
def test_what_crosses_the_cut_and_what_comes_out(network, _, __, crossing):
    model, x = build(network, seed=0), rows(network)
    first, second = model.segments
    assert (first, second) == (("client", "server") if type(network) in (SplitMLP, SplitCNN) else ("extractor", "classifier"))
    w = model.initial()
    h = model.forward(w, x, until=second)
    z = model.forward(w, h, enters=second)
    assert h.shape == (2, *crossing)
    assert z.shape == (2, network.classes)
    assert model.criterion is cross_entropy
    assert z.min() < 0, "logits, so no softmax and no ReLU at the end"
    if type(network) is not Logistic:
        assert h.min() >= 0, "the activation belongs before the cut"


def test_layers_have_names_that_run_through_both_segments():
    assert layers(LeNet5(), "extractor") == ["conv1", "conv1_relu", "pool1", "conv2", "conv2_relu", "pool2", "flatten"]
    assert layers(LeNet5(), "classifier") == ["fc1", "fc1_relu", "fc2", "fc2_relu", "fc3"]
    assert layers(ShallowCNN(), "extractor") == ["conv1", "pool1", "flatten", "fc1", "fc1_relu"]  # conv1 is not activated
    assert layers(IntrusionMLP(), "extractor") == ["flatten", "fc1", "fc1_tanh", "fc2", "fc2_relu"]
    assert layers(SmallVGG(norm="batch"), "extractor")[:7] == [
        *("conv1", "conv1_norm", "conv1_relu", "conv2", "conv2_norm", "conv2_relu", "pool1")
    ]
    mixed = CNN(channels=(4, 4), activation=("tanh", "gelu", "sigmoid"))
    assert [name for name in layers(mixed, "extractor") if "_" in name] == ["conv1_tanh", "conv2_gelu", "fc1_sigmoid"]
    assert layers(SplitCNN(), "server")[:4] == ["conv3", "conv3_relu", "pool3", "flatten"]
    kinds = {type(m) for n in NETWORKS if type(n) is not ResNet18 for s in n.segments().values() for m in s.children()}
    assert kinds == {nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.Flatten, nn.ReLU, nn.Tanh, nn.GroupNorm, nn.BatchNorm2d}


def test_lenet_is_the_written_out_formula():
    model = build(LeNet5(), seed=3)
    w, x = model.initial(), rows(LeNet5())
    h = x
    for i in (1, 2):
        conv = F.conv2d(h, w[f"extractor.conv{i}.weight"], w[f"extractor.conv{i}.bias"])
        h = F.max_pool2d(F.relu(conv), 2)
    h = h.flatten(1)
    for i in (1, 2, 3):
        h = F.linear(h, w[f"classifier.fc{i}.weight"], w[f"classifier.fc{i}.bias"])
        h = F.relu(h) if i < 3 else h
    torch.testing.assert_close(model.forward(w, x), h)


def test_a_residual_block_adds_the_row_to_its_body():
    """With a body of zeros relu(0 + x): -1, 2 give 0, 2. Across a stride the shortcut takes every other pixel, here times 3."""
    x = torch.tensor([-1.0, 2.0]).reshape(1, 2, 1, 1).expand(1, 2, 4, 4)
    block = Residual(2, 2, stride=1, norm="group")
    nn.init.zeros_(block.body.conv2.weight)
    assert torch.equal(block(x), x.clamp(min=0))
    block = Residual(2, 2, stride=2, norm="batch").eval()
    nn.init.zeros_(block.body.conv2.weight)
    block.shortcut.conv.weight.data = 3 * torch.eye(2).reshape(2, 2, 1, 1)
    torch.testing.assert_close(block(x), 3 * x[..., ::2, ::2].clamp(min=0), rtol=1e-4, atol=1e-4)  # BatchNorm's eps


def test_resnet_halves_the_image_three_times():
    network = replace(ResNet18(), cut="layer4", names=("client", "server"))
    model = build(network, seed=0)
    assert model.forward(model.initial(), rows(network), until="server").shape == (2, 256, 8, 8)
    small = build(ResNet18(image=(1, 12, 20)), seed=0)
    assert small.forward(small.initial(), torch.zeros(2, 1, 12, 20)).shape == (2, 10)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_every_convolution_gets_the_norm_asked_for_and_no_bias(norm):
    kind = {"group": nn.GroupNorm, "batch": nn.BatchNorm2d}[norm]
    for network in (LeNet5(norm=norm), SmallVGG(norm=norm), ResNet18(norm=norm)):
        found = [m for s in network.segments().values() for m in s.modules()]
        convs = [m for m in found if isinstance(m, nn.Conv2d)]
        norms = [m for m in found if isinstance(m, kind)]
        assert [m.bias for m in convs] == [None] * len(norms), network
    assert build(LeNet5(norm=norm), seed=0).buffers() == (
        tuple(f"extractor.conv{i}_norm.running_{what}" for i in (1, 2) for what in ("mean", "var")) if norm == "batch" else ()
    )


def test_a_group_norm_has_two_groups_where_the_width_is_even():
    norms = [m for m in CNN(channels=(8, 7), norm="group").segments()["extractor"].modules() if isinstance(m, nn.GroupNorm)]
    assert [(m.num_groups, m.num_channels) for m in norms] == [(2, 8), (1, 7)]


@pytest.mark.parametrize("network", [LeNet5(norm="group"), ResNet18(image=(3, 8, 8)), IntrusionMLP()], ids=repr)
def test_many_weights_side_by_side_give_what_each_gives_alone(network):
    model, x = build(network, seed=0), rows(network)
    lanes = [model.initial(), build(network, seed=1).initial()]
    stacked = {leaf: torch.stack([w[leaf] for w in lanes]) for leaf in lanes[0]}
    together = torch.func.vmap(lambda w: model.forward(w, x))(stacked)
    for alone, lane in zip(lanes, together, strict=True):
        torch.testing.assert_close(lane, model.forward(alone, x), rtol=1e-4, atol=1e-5)


def test_any_network_splits_anywhere_and_keeps_its_function():
    whole = build(CNN(), seed=5)
    for at, client in [("conv2", 3), ("fc1", 7), ("fc2", 9)]:
        split = build(CNN(cut=at, names=("client", "server")), seed=5)
        assert [len(s) for s in split.segments.values()] == [client, 10 - client]
        x = rows(CNN())
        assert torch.equal(split.forward(split.initial(), x), whole.forward(whole.initial(), x))


@pytest.mark.parametrize("network", [FemnistCNN(), SmallVGG()], ids=repr)
def test_xavier_stays_within_its_bound_and_starts_with_zero_biases(network):
    for layer in (m for s in build(network, seed=0).segments.values() for m in s.children() if hasattr(m, "weight")):
        area = layer.weight[0, 0].numel()
        bound = (6 / ((layer.weight.shape[0] + layer.weight.shape[1]) * area)) ** 0.5
        assert 0.9 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()
    assert build(LeNet5(), seed=0).segments["classifier"].fc1.bias.any()


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (LeNet5(classes=0), "LeNet5: classes must be a whole number of at least 1, not 0"),
        (ResNet18(classes=True), "ResNet18: classes must be a whole number of at least 1, not True"),
        (Logistic(inputs=0), "Logistic: inputs must be a whole number of at least 1, not 0"),
        (MLP(classes=2.0), "MLP: classes must be a whole number of at least 1, not 2.0"),
        (MLP(hidden=[32]), "MLP: hidden must be a tuple of positive whole numbers, not [32]"),
        (MLP(hidden=(8, 0)), "MLP: hidden must be a tuple of positive whole numbers, not (8, 0)"),
        (CNN(channels=()), "CNN: channels must be a non-empty tuple of positive whole numbers, not ()"),
        (CNN(image=(28, 28)), "CNN: image must be a tuple of 3 positive whole numbers, not (28, 28)"),
        (CNN(padding=-1), "CNN: padding must be a whole number of at least 0, not -1"),
        (CNN(depth=0), "CNN: depth must be a whole number of at least 1, not 0"),
        (CNN(norm="grop"), "CNN: norm must be one of none, group, batch, not 'grop'; did you mean 'group'?"),
        (CNN(norm="BatchNorm"), "CNN: norm must be one of none, group, batch, not 'BatchNorm'; did you mean 'batch'?"),
        (CNN(norm=None), "CNN: norm must be one of none, group, batch, not None; did you mean 'none'?"),
        (ResNet18(norm="none"), "ResNet18: norm must be one of group, batch, not 'none'"),
        (CNN(init="xavierr"), "CNN: init must be one of torch, xavier, not 'xavierr'; did you mean 'xavier'?"),
        (
            MLP(activation="ReLu"),
            "MLP: activation must be one of relu, tanh, gelu, sigmoid, none, not 'ReLu'; did you mean 'relu'?",
        ),
        (MLP(activation=None), "MLP: activation must be one of relu, tanh, gelu, sigmoid, none, not None; did you mean 'none'?"),
        (MLP(hidden=(), activation="x"), "MLP: activation must be one of relu, tanh, gelu, sigmoid, none, not 'x'"),
        (
            MLP(activation=("relu", "tanh")),
            "MLP: activation must be one word or one per layer, 1 here, not ('relu', 'tanh')",
        ),
        (LeNet5(image=(3, 15, 32)), "LeNet5: image 3x15x32 is too small: nothing is left to pool in block 2"),
        (SplitMLP(cut="fc9"), "SplitMLP: cut must be one of last, fc2, fc3, fc4, not 'fc9'; did you mean 'fc4'?"),
        (CNN(cut="conv1"), "CNN: cut must be one of last, conv2, fc1, fc2, not 'conv1'; did you mean 'conv2'?"),
        (ResNet18(cut="conv1_norm"), "ResNet18: cut must be one of last, layer1, layer2, layer3, layer4, fc, not 'conv1_norm'"),
        (
            MLP(hidden=(), activation=None),
            "MLP: activation must be one of relu, tanh, gelu, sigmoid, none, not None; did you mean 'none'?",
        ),
        (CNN(names="ab"), "CNN: names must be a tuple of two different words without a dot, not 'ab'"),
        (CNN(names=("a", "a")), "CNN: names must be a tuple of two different words without a dot, not ('a', 'a')"),
        (CNN(names=("a.b", "c")), "CNN: names must be a tuple of two different words without a dot, not ('a.b', 'c')"),
    ],
    ids=repr,
)
def test_a_number_that_makes_no_sense_is_one_sentence(network, says):
    with pytest.raises(ValueError, match=r"^\w+: ") as error:
        network.segments()
    assert str(error.value) == says


def test_the_smallest_image_that_fits_does_fit():
    assert build(LeNet5(image=(1, 16, 16)), seed=0).forward({}, torch.zeros(1, 1, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_networks_are_values_that_travel(network):
    assert decode(encode(network, Store()), Store()) == network
    assert {network: 1}[replace(network)] == 1
    assert replace(network, classes=3) != network


def test_importing_and_describing_models_loads_no_torch():
    described = "; ".join(f"m.{network!r}" for network in NETWORKS)
    code = f"import sys, fedrelay.models as m; {described}; m.LeNet5().check(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names():
    assert models.__all__ == [
        *("CNN", "MLP", "CifarCNN", "DigitsMLP", "FedAvgCNN", "FemnistCNN", "IntrusionMLP", "LeNet5", "Logistic", "Model"),
        *("Network", "ResNet18", "ShallowCNN", "SmallVGG", "SplitCNN", "SplitMLP", "build", "count_parameters"),
        *("cross_entropy", "squared_error"),
    ]
    assert all(hasattr(models, name) for name in models.__all__)
